"""Damage that XML may come with: cuts, doubled parts, hostile numbers, other bytes."""

import random
import re
from collections.abc import Callable, Iterator
from typing import Final

NUMBERS: Final = (
    "1e999",
    "-1",
    "1" + "0" * 30,
    "NaN",
    "0x",
    "",
    "\u0966",
    "9" * 1000,
    "\uff11\uff16",
    "1_0",
    "inf",
)


def cut(text: str, chance: random.Random) -> str:
    return text[: chance.randrange(len(text))]


def cut_out(text: str, chance: random.Random) -> str:
    start = chance.randrange(len(text))
    return text[:start] + text[start + chance.randrange(1, 400) :]


def double(text: str, chance: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    start = chance.randrange(len(lines))
    end = start + chance.randrange(1, 30)
    return "".join(lines[:end] + lines[start:])


def flip_bytes(text: str, chance: random.Random) -> str:
    data = bytearray(text.encode())
    for _ in range(chance.randrange(1, 8)):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return data.replace(b"\0", b" ").decode("utf-8", errors="replace")


def drop_attributes(text: str, chance: random.Random) -> str:
    share = chance.choice((0.01, 0.1, 0.5))
    return re.sub(r' \w+="[^"]*"', lambda m: "" if chance.random() < share else m.group(), text)


def drop_elements(text: str, chance: random.Random) -> str:
    return re.sub(r"<\w+ [^>]*/>", lambda m: "" if chance.random() < 0.2 else m.group(), text)


def hostile_numbers(text: str, chance: random.Random) -> str:
    share = chance.choice((0.01, 0.1, 0.9))

    def replaced(match: re.Match[str]) -> str:
        return f'="{chance.choice(NUMBERS)}"' if chance.random() < share else match.group()

    return re.sub(r'="[0-9][^"]*"', replaced, text)


def swap_values(text: str, chance: random.Random) -> str:
    values = re.findall(r'="([^"]{0,99})"', text) or ["0"]
    return re.sub(
        r'="[^"]*"',
        lambda m: f'="{chance.choice(values)}"' if chance.random() < 0.03 else m.group(),
        text,
    )


def rename_tags(text: str, chance: random.Random) -> str:
    tags = sorted(set(re.findall(r"</?(\w+)", text))) or ["a"]
    old, new = chance.choice(tags), chance.choice(tags)
    return re.sub(rf"(</?){old}\b", rf"\g<1>{new}", text)


def in_matrix(text: str, chance: random.Random) -> str:
    return re.sub(
        r"(?<=[> ])\d+(?= )",
        lambda m: chance.choice(NUMBERS[:5]) if chance.random() < 0.02 else m.group(),
        text,
    )


MUTATIONS: Final[tuple[Callable[[str, random.Random], str], ...]] = (
    cut,
    cut_out,
    double,
    flip_bytes,
    drop_attributes,
    drop_elements,
    hostile_numbers,
    swap_values,
    rename_tags,
    in_matrix,
)


def mutated(texts: list[str], seed: int, count: int) -> Iterator[tuple[str, str]]:
    """Yield (what was done, text) of ``count`` damaged texts; equal for equal seeds."""
    chance = random.Random(seed)
    for number in range(count):
        text = chance.choice(texts)
        names = []
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            mutation = chance.choice(MUTATIONS)
            names.append(mutation.__name__)
            text = mutation(text, chance) or " "
        yield f"{seed}/{number} {'+'.join(names)}", text
