"""Words that the project no longer uses: phrases in text for people, identifiers in the code.

A phrase is a regular expression over text without line breaks; single everyday words are never
retired in prose. To retire a phrase or an identifier, add it to the list.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
CODE = sorted(
    p for top in ("cli", "core", "kernels", "examples") for p in (ROOT / top).rglob("*.py")
)
TEXTS = [ROOT / "README.md", *sorted((ROOT / "man").glob("*.1")), *CODE]

PHRASES = (
    r"a little web of", r"one of each; reasons", r"written, not run", r"what a stage takes out",
    r"learns on the way", r"draws? the harvest", r"stands? out is not taken", r"rows? to blame",
    r"roll call", r"(?:calls|takes) the roll", r"a watch who", r"attention both ways",
    r"models with sight", r"handed on as it is", r"the house", r"has one home", r"the mend\b",
    r"mends? (?:it|them|the)\b", r"figures of the run as json", r"no notes on stderr",
    r"rest of a host", r"ask again, on conditions", r"can be had later", r"of models of the core",
    r"in its small form", r"numbers to be met", r"from which two are one", r"whom to keep",
    r"least copy", r"copies that make a line go", r"that a token visits", r"loses no lag",
    r"stand still until", r"so many courses", r"energy of the building", r"sum up a pyramid",
    r"chips apart that", r"expected the truth", r"how large are the adapters", r"how much a step\?",
    r"makes it another run", r"answered nobody", r"judge is out\b", r"speak our language",
    r"no company", r"polite(?:ly)? stop", r"stop(?:s|ping)? polite", r"is over is void",
    r"how-manieth",
    r"vouch(?:es)? for", r"cannot spoil", r"waits in vain", r"teaches nothing",
    r"sampler that differs", r"loss of bad samples", r"while the rate decays",
    r"spreads above the median", r"says? of (?:itself|themselves)", r"nobody's copy",
    r"came to nothing", r"lets? go of", r"likest", r"stands beside", r"strangers",
)  # fmt: skip

IDENTIFIERS = """
    said told found place worth stranger strangers bury roll_call rollcall practice subject subjects
    door doors wish wishes chance chances served house room rooms mend mends bell farewell heard
    beat beats went came gone coming leaving travel doomed vouch vouches taught teaches handed
    handed_on company tallies whom whose lies stands goes tells says
"""


def in_one_line(path: Path) -> str:
    """The text of a file in lower case without comment signs, quotes at line ends and breaks."""
    lines = (re.sub(r'^[\s#]*f?"?|"?\s*$', "", line) for line in path.read_text().splitlines())
    return re.sub(r"\s+", " ", " ".join(lines)).lower()


def test_no_retired_phrase() -> None:
    retired = re.compile("|".join(PHRASES))
    uses = {str(p.relative_to(ROOT)): retired.findall(in_one_line(p)) for p in TEXTS}
    assert not {path: phrases for path, phrases in uses.items() if phrases}


def identifiers(path: Path) -> Iterator[tuple[str, int]]:
    """(name, line) of all names, attributes, parameters, functions, classes and imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        line = getattr(node, "lineno", 0)
        for field in ("id", "attr", "arg", "name", "asname"):
            if isinstance(name := getattr(node, field, None), str):
                yield name.rpartition(".")[2], line


def test_no_retired_identifier() -> None:
    retired = set(IDENTIFIERS.split())
    assert not [
        (str(path.relative_to(ROOT)), name, line)
        for path in CODE
        for name, line in identifiers(path)
        if name.strip("_") in retired
    ]


def test_the_checks_find_what_they_look_for(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        'note = (\n    "before the roll "\n    "call"\n)\n\n\ndef _bury(x): x.place = 1\n'
    )
    assert re.search("roll call", in_one_line(file))
    assert {"_bury", "place"} < {name for name, _ in identifiers(file)}
