"""The JSON file that `classify threshold` writes and `classify --calibration` applies.

{"score": NAME, "thresholds": {"other": 0.43, "pt": 0.51, "de": null}, "calibration": {…}, …}: a
document passes when its score reaches the threshold of its language (`other` for languages without
one); null means that no document passes. Thresholds apply to the score before calibration. The file
adds the scores NAME_ok (1 or 0) and NAME_probability and does not change NAME, so applying it twice
gives the same result.
"""

import hashlib
import json
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sabia.core.errors import BadData, UsageError
from sabia.core.shards.arrow_arrays import cast
from sabia.core.text.classify.score_calibration import Calibration, from_json
from sabia.core.text.score_column import alike, score_names, score_values

OTHER = "other"


@dataclass(frozen=True)
class CalibrationFile:
    """The calibration of a score and its thresholds by language; `digest` is a hash of the file."""

    path: str
    score: str
    thresholds: dict[str, float | None]
    calibration: Calibration
    digest: str

    def apply(self, values: np.ndarray, language: pa.Array) -> dict[str, np.ndarray]:
        """The new scores, float64[n] each, NaN where values[n] is."""
        names = [name for name in self.thresholds if name != OTHER]
        limits = [self.thresholds[name] for name in (*names, OTHER)]
        thresholds = np.array([np.inf if limit is None else limit for limit in limits])
        index = pc.fill_null(pc.index_in(language, pa.array(names, pa.string())), len(names))
        passes = values >= thresholds[np.asarray(index)]
        missing = np.isnan(values)
        return {
            f"{self.score}_ok": np.where(missing, np.nan, passes),
            f"{self.score}_probability": self.calibration.probabilities(values),
        }


def read_calibration_file(path: str) -> CalibrationFile:
    """Read a calibration file. Raises UsageError (it cannot be opened), BadData."""
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise UsageError(f"--calibration: {path}: {error.strerror}") from error
    try:
        fields = json.loads(content)
        limits = {str(k): None if v is None else float(v) for k, v in fields["thresholds"].items()}
        if OTHER not in limits:
            raise ValueError(f"no threshold for {OTHER!r}")
        digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        calibration = from_json(fields["calibration"])
        return CalibrationFile(path, str(fields["score"]), limits, calibration, digest)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"({type(error).__name__}: {error})"
        raise BadData(
            f"--calibration: {path} is not a file of `classify threshold` {reason}"
        ) from error


def values_of(batch: pa.RecordBatch, name: str, option: str, required: bool) -> np.ndarray:
    """float64[n] of a score or of a column of numbers; NaN where missing.

    Raises UsageError for a column of another type and for a `required` score that no row has.
    """
    if name in batch.schema.names:
        what = f"{option}: column {name!r}"
        column = cast(batch.column(name), pa.float64(), what, "numbers", UsageError)
        return column.to_numpy(zero_copy_only=False)
    values = score_values(batch.column("scores"), name)
    if required and batch.num_rows and np.isnan(values).all():
        numbers = {
            field.name for field in batch.schema
            if pa.types.is_integer(field.type) or pa.types.is_floating(field.type)
        }  # fmt: skip
        known = score_names(batch.column("scores")) | numbers
        raise UsageError(f"{option}: no row has a score {name!r}{alike(name, known)}")
    return values
