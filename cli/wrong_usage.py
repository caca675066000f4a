"""A wrong command line in one line: the command, the option, the value, what was expected."""

import re
from typing import Any

# what typer says of a value → what we say
WORDS = {
    r"is not a valid (int|integer)( range)?\.?$": "is not a whole number",
    r"is not a valid float( range)?\.?$": "is not a number",
    r"is not in the range x>=(\S+?)\.?$": r"is too small (expected \1 or more)",
    r"is not in the range (\S+?)\.?$": r"is out of range (expected \1)",
    r"^No such option: (\S+)": r"\1: no such option",
    r"^No such command ": "no such command ",
    r"\(Possible options: (.*)\)$": r"(did you mean one of \1?)",
    r"^Got unexpected extra arguments? ": "unexpected ",
    r"^Missing (argument|parameter|option) ": r"missing \1 ",
}


def explained(error: Any) -> str:
    """The line for an error of typer's that has `format_message` and perhaps a parameter."""
    parameter = getattr(error, "param", None)
    text = error.message if parameter is not None and error.message else error.format_message()
    for found, said in WORDS.items():
        text = re.sub(found, said, text)
    option = next(iter(sorted(getattr(parameter, "opts", ()), key=len, reverse=True)), "")
    if option.startswith("-"):
        text = f"{option}: {text}"
    command = error.ctx.command_path if error.ctx else "sabia"
    more = "" if option else f"; {command} --help tells more"
    return f"{command}: error: {text.strip()}{more}"
