"""``python -m benchmarks.accuracy`` prints docs/accuracy.md; ``--write`` writes it and figures."""

import argparse

from benchmarks.accuracy.page import FIGURES, PAGE, page
from benchmarks.accuracy.stored import accuracy, read_results


def main() -> None:
    """Print or write the page."""
    parser = argparse.ArgumentParser(description="how near predicted step times come")
    parser.add_argument("--write", action="store_true", help=f"docs/{PAGE.name} and its figures")
    found = accuracy(read_results())
    if parser.parse_args().write:
        from benchmarks.accuracy.plots import draw  # matplotlib is for developers

        PAGE.write_text(page(found), "utf-8")
        draw(found.runs, FIGURES)
    else:
        print(page(found), end="")


if __name__ == "__main__":
    main()
