"""A controller under an auditor: what :class:`tests.run_rig.Run` starts, watched from before its first move."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quiesce import Controller, RunSummary
from quiesce.admission import Admission
from quiesce.auditor import Auditor, attach_auditor
from quiesce.checkpoint.loading import LoadedCheckpoint
from quiesce.checkpoint.saver import Checkpointer
from quiesce.dataplane import DataPlane
from quiesce.gate_fence import GateFence
from quiesce.owners import Owners


class AuditedController(Controller):
    """The controller, with an auditor that is attached once everything is built and restored."""

    auditor: Auditor | None = None
    audit_options: Mapping[str, Any] = {}
    sweeping = True

    def _checkpointer(
        self,
        owners: Owners,
        admission: Admission,
        dataplane: DataPlane,
        loaded: LoadedCheckpoint | None,
        fence: GateFence,
    ) -> Checkpointer:
        self.auditor = attach_auditor(
            owners,
            sweeping=self.sweeping,
            dataplane=dataplane,
            folder=self._folder.path,
            gate_window=self.config.sampler.gate_window,
            elsewhere=self._workers.outstanding,
            **self.audit_options,
        )
        return super()._checkpointer(owners, admission, dataplane, loaded, fence)

    async def run(self, *, resume: bool = False) -> RunSummary:
        """Run, and close the auditor whatever happens."""
        try:
            return await super().run(resume=resume)
        finally:
            if self.auditor is not None:
                await self.auditor.aclose()
