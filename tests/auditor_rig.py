"""A controller whose auditor is told more than a configuration can say: what :class:`tests.run_rig.Run` starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quiesce import Controller
from quiesce.auditor import Auditor
from quiesce.checkpoint.loading import LoadedCheckpoint
from quiesce.dataplane import DataPlane
from quiesce.owners import Owners


class AuditedController(Controller):
    """The controller as it is, with further options for its auditor: a clock, a pace."""

    audit_options: Mapping[str, Any] = {}

    def _audit(
        self,
        owners: Owners,
        dataplane: DataPlane,
        loaded: LoadedCheckpoint | None,
        **options: Any,  # noqa: ANN401 - as its base
    ) -> Auditor:
        return super()._audit(owners, dataplane, loaded, **{**options, **self.audit_options})
