"""The dashboard of the training run: reward, pace, staleness, what it waits for, the device, and telemetry itself."""

from __future__ import annotations

from quiesce.telemetry import names
from quiesce_dashboards.objectives import AlertConfig
from quiesce_dashboards.panels import BAD, GOOD, Ask, Column, Section, heat, lines, mapped, number, table
from quiesce_dashboards.queries import came, newest, picked, quantile, sum_by
from quiesce_dashboards.shared import open_violations, run_state

__all__ = ["training"]

_GREW = "$__rate_interval"
_WHOLE = "$__range"


def training(config: AlertConfig) -> list[Section]:
    """Return the dashboard's parts.

    Args:
        config: The objectives.
    """
    return [
        Section("The run", _run(config)),
        Section("Does it learn?", _learning()),
        Section("How fast, and what does it wait for?", _pace()),
        Section("The device", _device()),
        Section("Telemetry itself", _telemetry()),
    ]


def _run(config: AlertConfig) -> list[tuple[int, int, object]]:
    started = sum_by([], picked(names.RUN_STARTED), function="max")
    return [
        (4, 4, run_state()),
        (4, 4, open_violations(config)),
        (
            4,
            4,
            number(
                "Trainer version",
                "How often the trainer's weights changed: steps along the restored lineage. Good: it rises.",
                Ask(sum_by([], picked(names.TRAINER_VERSION), function="max")),
                unit="none",
                decimals=0,
                graph=True,
            ),
        ),
        (
            4,
            4,
            number(
                "Reward, last step",
                "Mean reward of the last step. Good: higher than at the start.",
                Ask(sum_by([], picked(names.TRAIN_REWARD), function="avg")),
                unit="none",
                decimals=3,
                graph=True,
            ),
        ),
        (
            4,
            4,
            number(
                "Tokens a second",
                "Tokens that rollouts generate, of dropped groups too. Good: level.",
                Ask(sum_by([], f"rate({picked(names.TOKENS_GENERATED)}[{_GREW}])")),
                unit="none",
                decimals=0,
                graph=True,
            ),
        ),
        (
            4,
            4,
            number(
                "Up for",
                "Time since metrics were switched on in this process. Good: it grows. It begins anew at each resume.",
                Ask(f"time() - {started}", instant=True),
                unit="s",
            ),
        ),
        (
            24,
            4,
            table(
                "What the run is made of",
                "Sampler, data plane, engine and version of each process of the run. Good: one version, and no "
                "process too many.",
                Ask(
                    sum_by(
                        ["instance", "role", "sampler", "dataplane", "engine", "version"],
                        newest(picked(names.RUN_INFO), ["job", "instance", "role"]),
                        function="max",
                    ),
                    table=True,
                ),
                columns=[
                    Column("instance", "instance"),
                    Column("role", "role"),
                    Column("sampler", "sampler"),
                    Column("dataplane", "data plane"),
                    Column("engine", "engine"),
                    Column("version", "version"),
                ],
            ),
        ),
    ]


def _learning() -> list[tuple[int, int, object]]:
    return [
        (
            12,
            8,
            lines(
                "Reward",
                "Mean reward of each step. Good: it rises and stays. A fall right after a restore is worth a look.",
                Ask(sum_by([], picked(names.TRAIN_REWARD), function="avg"), "reward"),
                unit="none",
                stepped=True,
                low=None,
                named=("reward",),
            ),
        ),
        (
            6,
            8,
            lines(
                "Loss",
                "Loss of each step. Good: no jump. In GRPO its value says little; a jump says that something changed.",
                Ask(sum_by([], picked(names.TRAIN_LOSS), function="avg"), "loss"),
                unit="none",
                stepped=True,
                low=None,
                named=("loss",),
            ),
        ),
        (
            6,
            8,
            lines(
                "KL divergence",
                "How far the policy has gone from its reference, where that is computed. Good: small, level. "
                "Empty: this run does not compute it.",
                Ask(sum_by([], picked(names.TRAIN_KL), function="avg"), "KL"),
                unit="none",
                stepped=True,
                low=None,
                named=("KL",),
            ),
        ),
        (
            12,
            8,
            heat(
                "Staleness",
                "Trainer versions between a group's admission and its training, mean of each step. Good: one band at the "
                "lookahead of the sampler or below. Empty: no step was trained in this range.",
                Ask(
                    came(picked(names.STALENESS, "_bucket"), ["le"]),
                    "{{le}}",
                    heatmap=True,
                ),
                unit="none",
            ),
        ),
        (
            12,
            8,
            lines(
                "Groups trained",
                "Prompt groups that steps trained, each second. Good: level, at the pace of the trainer.",
                Ask(sum_by([], f"rate({picked(names.GROUPS_TRAINED)}[{_GREW}])"), "groups"),
                unit="suffix:groups/s",
                named=("groups",),
            ),
        ),
    ]


def _pace() -> list[tuple[int, int, object]]:
    return [
        (
            12,
            8,
            lines(
                "Trainer steps",
                "How long steps took. Good: level. The dots are steps whose trace was kept; they open it. "
                "Empty: no step was trained in this range.",
                Ask(quantile(0.5, names.TRAIN_STEP_SECONDS), "median", exemplar=True),
                Ask(quantile(0.95, names.TRAIN_STEP_SECONDS), "p95", exemplar=True),
                unit="s",
                named=("median", "p95"),
            ),
        ),
        (
            12,
            8,
            lines(
                "Tokens a second over time",
                "Tokens that rollouts generate. Good: level; it dips while a gate is closed and while weights are handed "
                "over.",
                Ask(sum_by([], f"rate({picked(names.TOKENS_GENERATED)}[{_GREW}])"), "tokens"),
                unit="suffix:tokens/s",
                named=("tokens",),
            ),
        ),
        (
            12,
            8,
            lines(
                "The trainer is idle",
                "Share of time in which the train pump had nothing to train on (groups), or waited for weights to be "
                "handed over (sync). Good: small. Much idle for groups: rollouts are the bottleneck.",
                Ask(
                    sum_by(["cause"], f"rate({picked(names.TRAIN_IDLE)}[{_GREW}])"),
                    "{{cause}}",
                ),
                unit="percentunit",
                stacked=True,
                high=1,
                named=("groups", "sync"),
            ),
        ),
        (
            12,
            8,
            lines(
                "Saving holds the trainer up",
                "Share of time in which saving held the train pump up, by cause. Good: below a hundredth. What still holds "
                "it up is counted once it is over; until then the panel of phases shows it.",
                Ask(
                    sum_by(["cause"], f"rate({picked(names.TRAINER_STALL)}[{_GREW}])"),
                    "{{cause}}",
                ),
                unit="percentunit",
                stacked=True,
                high=1,
                named=("previous_write", "fence", "window", "stage"),
            ),
        ),
    ]


def _device() -> list[tuple[int, int, object]]:
    return [
        (
            12,
            8,
            lines(
                "GPU memory",
                "Memory of the process's CUDA device: allocated, reserved, and all there is. Empty: the process has no "
                "CUDA device. Good: reserved well below the total.",
                Ask(sum_by(["kind"], picked(names.GPU_MEMORY_BYTES), function="max"), "{{kind}}"),
                unit="bytes",
                named=("allocated", "reserved", "total"),
            ),
        ),
        (
            12,
            8,
            lines(
                "GPU utilization",
                "Share of time in which the CUDA device was busy. Empty: no CUDA device. Good: high, level.",
                Ask(sum_by([], picked(names.GPU_UTILIZATION), function="avg"), "busy"),
                unit="percentunit",
                high=1,
                named=("busy",),
            ),
        ),
    ]


def _telemetry() -> list[tuple[int, int, object]]:
    lost = picked(names.TELEMETRY_SINK_SPANS, fate=("dropped", "failed"))
    return [
        (
            6,
            6,
            number(
                "Telemetry's processor time",
                "Processor time of telemetry as a share of one core: its threads as measured, its hooks as estimated. "
                "Good: below a hundredth or two.",
                Ask(sum_by([], f"rate({picked(names.TELEMETRY_CPU)}[{_GREW}])")),
                unit="percentunit",
                graph=True,
            ),
        ),
        (
            6,
            6,
            number(
                "Hooks that raised",
                "Hooks that raised, and sources that could not be read, in the range shown. Good: 0; training goes on "
                "without them.",
                Ask(sum_by([], f"increase({picked(names.OBSERVER_ERRORS)}[{_WHOLE}])"), instant=True),
                decimals=0,
                steps=((None, GOOD), (0.5, BAD)),
            ),
        ),
        (
            12,
            6,
            table(
                "Parts of the run",
                "Which parts attached, so that their metrics exist. Good: those that you built. A panel of a part "
                "that is not "
                "there is empty.",
                Ask(sum_by(["name"], picked(names.CAPABILITY), function="max") + " > 0", table=True),
                columns=[
                    Column("name", "part"),
                    Column("Value", "state", "none", mappings=mapped({1: ("attached", GOOD)})),
                ],
                sort="part",
                falling=False,
            ),
        ),
        (
            8,
            8,
            lines(
                "Spans by fate",
                "What became of spans. Good: exported, and sampled where there are more than the budget. dropped and "
                "failed: a collector is away or too slow; training does not wait for it.",
                Ask(
                    sum_by(["fate"], f"rate({picked(names.TELEMETRY_SPANS)}[{_GREW}])"),
                    "{{fate}}",
                ),
                unit="suffix:spans/s",
                stacked=True,
                named=("exported", "sampled", "dropped", "failed"),
            ),
        ),
        (
            8,
            8,
            lines(
                "Spans lost at a sink",
                "Spans that a sink was to be given and did not take, by sink and by what became of them there. Good: none. "
                "dropped: for want of room or time; failed: refused. Another sink may have them all the same.",
                Ask(came(lost, ["sink", "fate"]), "{{sink}}, {{fate}}"),
                bars=True,
                stacked=True,
                named=[f"{sink}, {fate}" for sink in names.SPAN_SINKS for fate in ("dropped", "failed")],
            ),
        ),
        (
            8,
            8,
            lines(
                "Exporting",
                "How long sinks took for what they were given at once. Good: milliseconds. It is off the training's "
                "threads.",
                Ask(quantile(0.5, names.TELEMETRY_EXPORT), "median"),
                Ask(quantile(0.99, names.TELEMETRY_EXPORT), "p99"),
                unit="s",
                named=("median", "p99"),
            ),
        ),
    ]
