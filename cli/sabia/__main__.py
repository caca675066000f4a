"""`python -m sabia` is the command `sabia`."""

from sabia.cli.main import main

if __name__ == "__main__":
    main()
