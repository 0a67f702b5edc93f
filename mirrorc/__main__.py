"""``python -m mirrorc`` is the command ``mirrorc``."""

from mirrorc.cli import main

if __name__ == "__main__":
    main()
