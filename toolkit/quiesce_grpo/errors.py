"""Errors of the reference run.

Rule: as in `quiesce.errors`: a class builds its own message and names the thing at fault. What is wrong with
the run as a whole stands under the root of `quiesce`; what is wrong with one prompt group does not, since the
controller takes what stands there for a failure of the run, and anything else for a failure of that attempt.
Nothing here suspends.

::

    QuiesceError
    ├── ConfigError                     (of `quiesce`; a setting that cannot be)
    └── ReferenceRunError
        ├── BatchError                  (ValueError)
        ├── EngineClosedError
        ├── NonFinitePolicyError        (ArithmeticError)
        └── StaleWeightsError           (ValueError)
    ValueError
    ├── RewardError
    ├── StagedRowError
    └── VocabularyError
"""

from quiesce.errors import QuiesceError

__all__ = [
    "BatchError",
    "EngineClosedError",
    "NonFinitePolicyError",
    "ReferenceRunError",
    "RewardError",
    "StagedRowError",
    "StaleWeightsError",
    "VocabularyError",
]


class ReferenceRunError(QuiesceError):
    """Raised when the reference run's own machinery cannot do what it was asked to."""


class VocabularyError(ValueError):
    """Raised when a text cannot be written in a vocabulary, or a token is not of it."""

    def __init__(self, what: str, vocabulary: str) -> None:
        super().__init__(f"{what} is not in the vocabulary ({vocabulary})")


class RewardError(ValueError):
    """Raised when a task scores an answer with something that is not a finite number."""

    def __init__(self, task: str, index: int, value: object) -> None:
        super().__init__(f"task {task} scored prompt {index} with {value!r}, which is no finite number")


class StagedRowError(ValueError):
    """Raised when a restored group's staged row is not what a generation call puts; another attempt begins anew."""

    def __init__(self, group_id: str, problem: str) -> None:
        super().__init__(f"a staged row of group {group_id} {problem}; it cannot be gone on from")


class BatchError(ReferenceRunError, ValueError):
    """Raised when a training batch does not hold what a GRPO step needs."""

    def __init__(self, step: int, group_id: str, problem: str) -> None:
        self.group_id = group_id
        super().__init__(f"batch of step {step}, group {group_id}: {problem}")


class NonFinitePolicyError(ReferenceRunError, ArithmeticError):
    """Raised when a policy gives log-probabilities that are not finite: it diverged."""

    def __init__(self, version: int) -> None:
        self.version = version
        super().__init__(
            f"the policy of weight version {version} gives log-probabilities that are not finite"
        )


class StaleWeightsError(ReferenceRunError, ValueError):
    """Raised when an engine is given weights that are older than those it has."""

    def __init__(self, version: int, current: int) -> None:
        super().__init__(
            f"weights of version {version} were given to an engine that already has version {current}"
        )


class EngineClosedError(ReferenceRunError):
    """Raised for a generation call that the engine cannot finish because it is closed or being closed."""

    def __init__(self, group_id: str) -> None:
        self.group_id = group_id
        super().__init__(f"the rollout engine is closed; generation of group {group_id} was given up")
