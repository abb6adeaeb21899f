"""Calls to the control plane: the roster, the lock, constants and targets."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
from steelyard.v1 import control_pb2, control_pb2_grpc, types_pb2

from calibrator.errors import CalibrationRunning, ClusterUnavailable
from calibrator.slo import ClassTargets
from controlplane.core.values import Constants
from controlplane.wire import constants_to, stored_constants
from servicekit.status import from_rpc_error

_TIMEOUT_SECONDS = 10.0


class ControlClient:
    """The control plane, as a calibration uses it.

    Every method raises `ClusterUnavailable` when the control plane or its Redis does not answer.
    """

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self._address = address
        self._stub: Any = control_pb2_grpc.ControlServiceStub(channel)

    async def roster(self) -> types_pb2.Roster:
        """Return who is there, and what holds."""
        request = control_pb2.WatchClusterRequest()
        try:
            stream = self._stub.WatchCluster(request, timeout=_TIMEOUT_SECONDS, wait_for_ready=True)
            async for message in stream:
                stream.cancel()
                return types_pb2.Roster.FromString(message.snapshot.roster)
        except grpc.aio.AioRpcError as error:
            raise self._unavailable("the cluster is not known", error) from error
        raise ClusterUnavailable(f"{self._address} ended without a snapshot of the cluster")

    @asynccontextmanager
    async def lock(self, holder: str) -> AsyncIterator[None]:
        """Hold the cluster's calibration lock within the block.

        Raises:
            CalibrationRunning: Somebody else holds it.
            ClusterUnavailable: It was lost meanwhile; the block is cancelled.
        """
        stream = self._stub.HoldCalibration(control_pb2.HoldCalibrationRequest(holder=holder))
        await self._first_lease(stream)
        lost: list[ClusterUnavailable] = []
        watcher = asyncio.create_task(self._watch(stream, asyncio.current_task(), lost))
        try:
            yield
        except asyncio.CancelledError:
            if lost:
                raise lost[0] from None
            raise
        finally:
            watcher.cancel()
            stream.cancel()
            await asyncio.wait([watcher])

    async def _first_lease(self, stream: Any) -> None:
        """Wait until the lock is ours."""
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                first = await stream.read()
        except TimeoutError as error:
            stream.cancel()
            raise ClusterUnavailable(f"{self._address} gives no calibration lock") from error
        except grpc.aio.AioRpcError as error:
            remote = from_rpc_error(error)
            if remote.reason == "CALIBRATION_RUNNING":
                raise CalibrationRunning(
                    f"another calibration is running: {remote.message}; wait for it to end"
                ) from error
            raise self._unavailable("no calibration lock", error) from error
        if first is grpc.aio.EOF:
            raise ClusterUnavailable(f"{self._address} gives no calibration lock")

    async def _watch(
        self, stream: Any, body: asyncio.Task[Any] | None, lost: list[ClusterUnavailable]
    ) -> None:
        """Cancel the body once the lock is not ours any more."""
        try:
            while await stream.read() is not grpc.aio.EOF:
                continue
            lost.append(ClusterUnavailable("the control plane ended the calibration lock"))
        except grpc.aio.AioRpcError as error:
            lost.append(self._unavailable("the calibration lock was lost", error))
        if body is not None:
            body.cancel()

    async def current(self, profile: str) -> Constants:
        """Return the constants that hold; uncalibrated ones where nobody published any."""
        request = control_pb2.GetConstantsRequest(profile=profile)
        response = await self._call("constants are not readable", self._stub.GetConstants, request)
        return stored_constants(response.constants)

    async def publish(self, draft: Constants) -> Constants:
        """Publish constants as the next version; returns it with version and time.

        The caller has already compared it with the current version: a jump was accepted or is none.
        """
        request = control_pb2.PublishConstantsRequest(
            constants=constants_to(draft), accept_jump=True
        )
        response = await self._call("nothing was published", self._stub.PublishConstants, request)
        return stored_constants(response.constants)

    async def roll_back(self, profile: str, version: int) -> None:
        """Make an earlier version current again."""
        request = control_pb2.RollbackConstantsRequest(profile=profile, version=version)
        await self._call("not rolled back", self._stub.RollbackConstants, request)

    async def set_slo(self, targets: Mapping[str, ClassTargets], *, length_scaled: bool) -> None:
        """Replace the targets of the classes named; other classes and the default stay."""
        policy = types_pb2.SloPolicy(default_class="loose")
        policy.MergeFrom((await self.roster()).slo)
        for name, wanted in targets.items():
            entry = types_pb2.SloTargets()
            ttft = wanted.ttft_base_seconds if length_scaled else wanted.ttft_seconds
            entry.ttft.FromNanoseconds(round(ttft * 1e9))
            entry.tpot.FromNanoseconds(round(wanted.tpot_seconds * 1e9))
            if length_scaled:
                per_token = wanted.ttft_seconds_per_token
                entry.ttft_per_prompt_token.FromNanoseconds(round(per_token * 1e9))
            policy.classes[name].CopyFrom(entry)
        request = control_pb2.SetSloRequest(slo=policy)
        await self._call("targets were not set", self._stub.SetSlo, request)

    async def _call(self, failure: str, method: Any, request: Any) -> Any:
        try:
            return await method(request, timeout=_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise self._unavailable(failure, error) from error

    def _unavailable(self, failure: str, error: grpc.aio.AioRpcError) -> ClusterUnavailable:
        remote = from_rpc_error(error)
        return ClusterUnavailable(f"{failure}: {self._address}: {remote.reason}: {remote.message}")
