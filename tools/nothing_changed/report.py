"""The page of the matrix, docs/nothing-changed.md: a cell says "same", or what differs and why."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import NamedTuple

from tools.nothing_changed.features import Feature

SAME, NO_CELL = "same", "-"

TEXT = """\
# Nothing changed

`make nothing-changed` writes this page; `.ci/run` runs a part of it. Each program is a file in
[tests/libraries/programs](../tests/libraries/programs), after the README or an example of its library. It runs in a
process without hostcallback, in another one, and then in one with each feature. A feature that needs an edit, such as
a metric in the step, gets it where a user would make it. A cell is "same" if all of these are as without the feature:

- the results, parameters and Python state, to the last bit;
- the standard output, the exit status, and, except where a progress bar is drawn, the standard error output, without
  times and addresses;
- how often JAX traces and lowers each function of the program; in the first three columns, of JAX and libraries, too;
- the lowered code of every program without taps, and its key in the persistent compilation cache; in the first three
  columns no program may have taps (`accelerate` makes taps of the callbacks that there are);
- of a variant that fails while it is traced: the type and text of the exception, and the functions of the user that
  its traceback goes through.

Of results that differ a cell says by how much: in units in the last place (ulp) of the largest of all results.

A dash is a program without a loop that could have a bar or be stopped. The last line is the processor time of the
program under the feature, compiling included, over that without: the median of all programs.

{versions}.

{table}

{notes}"""


class Explained(NamedTuple):
    """A difference that is right.

    Attributes:
        program: its name, or a glob.
        feature: its name, or a glob.
        kinds: of the differences.
        reason: a footnote.
    """

    program: str
    feature: str
    kinds: tuple[str, ...]
    reason: str


EXPLAINED = (
    Explained(
        "jax_debug",
        "accelerate",
        ("traces", "lowerings", "programs"),
        "Accelerated callbacks get numpy arrays ([accelerate.md](accelerate.md)), so their arithmetic is numpy's: JAX "
        "compiles nothing for it.",
    ),
    *(
        Explained(
            program,
            "observe",
            ("results", "stdout"),
            "An observed value is computed on its own, as a result would be, and no more within what uses it, with "
            "fused multiply-adds ([design/xray.md](design/xray.md)). A long loop amplifies the last bits.",
        )
        for program in (
            "blackjax_nuts",
            "gymnax_rollout",
            "jax_md_minimize",
            "numpyro_mcmc",
            "tinygp_fit",
            "transformer",
        )
    ),
    *(
        Explained(
            program,
            feature,
            ("exit status", "stderr"),
            "Results of programs in it are infinite, which is what is reported: an initial best fitness of infinity, a "
            "division by 0 that is masked later, the exponential of a large number in a warm-up.",
        )
        for program in ("blackjax_nuts", "evosax_cma_es", "jax_md_minimize")
        for feature in ("watch", "capsule")
    ),
    *(
        Explained(
            program,
            feature,
            ("programs",),
            "What was compiled before the block, while the library was imported, is traced once more for it.",
        )
        for program in ("blackjax_nuts", "jax_md_minimize")
        for feature in ("observe", "time", "watch", "capsule")
    ),
    Explained(
        "*",
        "time",
        ("results", "stdout"),
        "XLA does not fuse operations of two places ([time.md](time.md#what-it-costs)), and each observed operation is "
        "one here. Loops, samplers and optimizers amplify the last bits: Adam makes a step of a gradient that is "
        "nothing but rounding, as that of a bias before a normalization.",
    ),
    *(
        Explained(
            program,
            "time",
            ("stderr",),
            "A place whose results nothing needs is computed nowhere: that it has no time is told once.",
        )
        for program in ("dynamiqs_mesolve", "lineax_solves", "optimistix_solvers")
    ),
    Explained(
        "numpyro_mcmc",
        "time",
        ("stderr",),
        "It emits a message for each iteration of its loops, and ends before they are delivered: an exit that waits "
        "for longer than three seconds says so.",
    ),
    *(
        Explained(
            "numpyro_mcmc",
            feature,
            ("programs", "cache keys"),
            "The edit itself, such as `hcb.check(jnp.isfinite(tau), ...)`, is a program where numpyro uses no jit.",
        )
        for feature in ("checked", "error_collector", "knob")
    ),
)


class Difference(NamedTuple):
    """Something that is not the same: a short name, such as "stdout", the details, and by how much it differs."""

    kind: str
    text: str
    amount: str = ""


@dataclass
class Cell:
    """A program under a feature.

    Attributes:
        differences: what is not the same.
        ratio: processor time over that without the feature.
    """

    differences: Sequence[Difference]
    ratio: float


@dataclass
class Matrix:
    """All cells, by program and feature; None where a feature does not apply."""

    features: Mapping[str, Feature]
    rows: dict[str, dict[str, Cell | None]] = field(default_factory=dict)
    explained: Sequence[Explained] = EXPLAINED

    def unexplained(self) -> Iterator[str]:
        """A line for each difference without an explanation."""
        for program, row in self.rows.items():
            for feature, cell in row.items():
                for kind, text, _ in cell.differences if cell else ():
                    if self._reason(program, feature, kind) is None:
                        yield f"{program} under {feature}: {kind}: {text}"

    def page(self, versions: str) -> str:
        """The page of docs/."""
        reasons: list[str] = []
        names = [feature.name for feature in self.features.values()]
        lines = ["| program | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
        for program, row in self.rows.items():
            cells = [self._shown(program, name, row.get(name), reasons) for name in self.features]
            lines.append(f"| {program} | " + " | ".join(cells) + " |")
        lines.append("| processor time | " + " | ".join(map(self._ratio, self.features)) + " |")
        notes = "\n".join(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))
        return TEXT.format(versions=versions, table="\n".join(lines), notes=notes).rstrip() + "\n"

    def _shown(self, program: str, feature: str, cell: Cell | None, reasons: list[str]) -> str:
        if cell is None:
            return NO_CELL
        shown = []
        for kind, amount in {each.kind: each.amount for each in cell.differences}.items():
            reason = self._reason(program, feature, kind)
            if reason is not None and reason not in reasons:
                reasons.append(reason)
            told = f"{kind}: {amount}" if amount else kind
            shown.append(f"{told} ({reasons.index(reason) + 1})" if reason else f"**{told}**")
        return ", ".join(shown) or SAME

    def _reason(self, program: str, feature: str, kind: str) -> str | None:
        for known in self.explained:
            if fnmatch(program, known.program) and fnmatch(feature, known.feature) and kind in known.kinds:
                return known.reason
        return None

    def _ratio(self, feature: str) -> str:
        ratios = [cell.ratio for row in self.rows.values() if (cell := row.get(feature)) is not None]
        return f"{statistics.median(ratios):.2f}" if ratios else NO_CELL
