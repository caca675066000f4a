"""Groups of options that several commands share, each declared once.

`sharing("training", OPTIONS)` adds a group to a command's signature; the command's parameter of the
group's name receives the values as one dictionary, the arguments of a configuration in core.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from sabia.core.shards.job import Job

Options = Mapping[str, tuple[Any, Any]]  # name → (annotation, default), in the order of the help
Declare = Callable[[Callable[..., None]], Callable[..., None]]


def sharing(group: str, options: Options, **defaults: Any) -> Declare:
    """A decorator that gives a command the options of a group; `defaults`: its own for some."""

    def declare(function: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(function, eval_str=True).parameters.values()
        keyword = inspect.Parameter.KEYWORD_ONLY
        shared = [
            inspect.Parameter(name, keyword, default=defaults.get(name, default), annotation=kind)
            for name, (kind, default) in options.items()
        ]

        @functools.wraps(function)
        def call(job: Job, **values: Any) -> None:
            given = {name: values.pop(name) for name in options}
            function(job, **{group: given}, **values)

        parameters = [p.replace(kind=keyword) if n else p for n, p in enumerate(own)]
        kept = [p for p in parameters if p.name != group]
        call.__signature__ = inspect.Signature(kept + shared)  # type: ignore[attr-defined]
        return call

    return declare
