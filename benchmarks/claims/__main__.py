"""``python -m benchmarks.claims`` prints the page of claims; ``--write`` writes docs/claims.md."""

import argparse

from benchmarks.claims.page import PAGE, every_claim, page


def main() -> None:
    """Print or write the page."""
    parser = argparse.ArgumentParser(description="claims about distributed training, and ours")
    parser.add_argument("--write", action="store_true", help=f"write docs/{PAGE.name}")
    options = parser.parse_args()
    text = page(every_claim())
    if options.write:
        PAGE.write_text(text, "utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
