"""`python -m sabia` is the command `sabia`."""

from sabia.cli.main import program

if __name__ == "__main__":
    program()
