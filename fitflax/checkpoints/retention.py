"""Which checkpoints are kept: the contents of `retention.json`, with the steps that each owner (a callback) wants.

A step is deleted only if a readable `retention.json` has it in no list. If the file is missing or damaged, the steps in the directory (except those the
caller wants) are recorded as `unknown` and kept until an owner adopts them, or until `claim(overwrite=True)` or the user removes them.

This module neither reads nor writes files; `CheckpointStore` does.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

RETENTION_FILE = "retention.json"


class Retention(NamedTuple):
    """Which of the existing steps are kept."""

    owners: dict[str, list[int]]
    unknown: list[int]  # All steps if `retention.json` is missing or damaged.
    late: list[int]  # Those in `unknown` that are newer than the file, because a full disk had no room for a new one.
    saving: Mapping[str, Any]  # The last save that was about to begin.
    newest: float  # The newest step that existed or was about to be saved.
    is_known: bool = True

    def wanted(self, owner: str) -> set[int]:
        """Returns the steps that an owner wants, and those that are newer than the file."""
        return {*self.owners.get(owner, ()), *self.late}

    def unwanted(self, present: Collection[int]) -> list[int]:
        """Returns the existing steps to delete."""
        return sorted(set(present).difference(self.unknown, *self.owners.values()))

    def is_saved_by_others_only(self, step: int, owner: str) -> bool:
        """Returns whether a checkpoint was saved so far only by owners other than this one."""
        is_next = self.saving.get("step") == step and owner in self.saving.get("also", ())
        return self.is_known and (is_next or step not in self.owners.get(owner, ()))

    def recorded(
        self, owner: str, wanted_steps: Collection[int], present: Collection[int], *, step: int | None, also: Collection[str], is_new: bool
    ) -> dict[str, Any]:
        """Returns the new contents of the file: which of the existing steps an owner wants from now on, and, with `step`, that it is about to be saved.

        The owners `also` will save the step next. If it `is_new`, it replaces a checkpoint of the same step that other owners wanted.
        """
        existing, saving = set(present), set() if step is None else {step}
        owners = {name: [one for one in steps if one in existing and not (is_new and one == step)] for name, steps in self.owners.items()}
        owners[owner] = sorted(set(wanted_steps) & (existing | saving))
        for other in also:
            owners[other] = sorted({*owners.get(other, ()), *saving})
        note: dict[str, Any] = {
            "owners": {name: steps for name, steps in owners.items() if steps},
            "unknown": sorted(existing.intersection(self.unknown).difference(wanted_steps)),
            "newest": max(existing | saving, default=-1),
        }
        if step is not None:
            # The owner's old steps are given up once the new one exists.
            instead = existing.intersection(self.owners.get(owner, ())).difference(wanted_steps)
            note["saving"] = {"step": step, "owner": owner, "instead": sorted(instead), "also": list(also)}
        return note


def parse_retention(note: Mapping[str, Any], present: list[int]) -> Retention:
    """Returns what `retention.json` says about the existing steps; `note` is `{}` if the file is missing or damaged."""
    owners, saving = note.get("owners"), note.get("saving")
    saving = saving if isinstance(saving, dict) else {}
    lists = [note.get("unknown"), *(owners.values() if isinstance(owners, dict) else [None]), saving.get("instead", [])]
    if not isinstance(note.get("newest"), int) or not all(isinstance(steps, list) and set(map(type, steps)) <= {int} for steps in lists):
        return Retention({}, present, [], {}, math.inf, is_known=False)
    assert isinstance(owners, dict)
    if saving and saving["step"] not in present:
        # The process died before the step existed, so the owner still wants its old steps.
        owner = saving["owner"]
        owners = {**owners, owner: sorted({*owners.get(owner, ()), *saving["instead"]})}
    late = [step for step in present if step > note["newest"]]
    return Retention(owners, [*note["unknown"], *late], late, saving, note["newest"])
