"""Write docs/config.md from the options in the code; a test keeps the two equal."""

from pathlib import Path

from megatrain.config import document

if __name__ == "__main__":
    path = Path(__file__).resolve().parent.parent / "docs" / "config.md"
    path.write_text(document(), encoding="utf-8")
    print(f"written: {path}")
