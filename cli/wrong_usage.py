"""A command line that typer cannot split, in one line: the command, the option, what was wrong."""

import re
from typing import Any

# what typer says → what we say
WORDS = {
    r"^No such option: (\S+)": r"\1: no such option",
    r"^No such command ": "no such command ",
    r"\(Possible options: (.*)\)$": r"(did you mean one of \1?)",
    r"^Got unexpected extra arguments? ": "unexpected ",
    r"^Option '(\S+)' requires an argument\.?": r"\1: is missing its value",
}


def explained(error: Any, command: str) -> str:
    """The line for an error of typer's in a call of a command ('': none was recognised)."""
    text = error.format_message()
    for found, said in WORDS.items():
        text = re.sub(found, said, text)
    return f"{text.strip()}; {f'sabia {command}'.strip()} --help shows what there is"
