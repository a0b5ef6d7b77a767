"""Every call of AdminService is in the audit log, whoever calls and however it ends."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from google.protobuf.message import Message
from prefixd_server.rpc import answers

from tests.support.companions import until
from tests.support.daemon import running_daemon
from tests.support.request_fields import METHODS, SERVICES, Known, sound
from tests.support.specs import spec
from tests.support.wire_engine import WireEngine, wire_engine

ADMIN_METHODS = [method.name for method in SERVICES[1].methods]
LOOKING = {"GetStats", "ListNamespaces", "ListLeases", "DescribeBlock", "Check", "ExplainBlock"}
OPERATORS = {"Drain", "Check", "SetMode", "HandOver"}


def begun(engine: WireEngine, method: str, messages: list[Message]) -> Any:
    """A call of a method that has begun."""
    stub: Any = getattr(engine.admin, method)
    request: Any = iter(messages) if METHODS[method].client_streaming else messages[0]
    return stub(request, timeout=20, metadata=(("prefixd-operator", "somebody"),))


@pytest.mark.parametrize("method", ADMIN_METHODS)
async def test_a_call_is_logged_with_tenant_caller_and_outcome(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "prefixd.audit")

    def lines() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.name == "prefixd.audit"]

    async with running_daemon("bob") as daemon:
        tenants = daemon.config.all_tenants
        refs = [daemon.cache.open_namespace(tenant.name, spec()) for tenant in tenants]
        for count, (tenant, ref) in enumerate(zip(tenants, refs, strict=True), start=1):
            assert tenant.socket is not None
            known = Known(answers.namespace_ref(ref), b"s" * 16, b"t" * 16)
            async with wire_engine(tenant.socket, None) as engine:
                call = begun(engine, method, sound(method, known))
                await until(lambda count=count: len(lines()) == count)
                call.cancel()
    told: list[Any] = [line.msg for line in lines()]
    assert [(line["method"], line["tenant"], line["caller"]) for line in told] == [
        (method, name, "somebody") for name in ("default", "bob")
    ]
    streams = METHODS[method].server_streaming
    assert told[0]["outcome"] == ("OPENED" if streams else "OK")
    refused = "ADMIN_REQUIRED" if method in OPERATORS else "OK"
    assert told[1]["outcome"] == ("OPENED" if streams else refused)
    assert {line.levelname for line in lines()} == {"DEBUG" if method in LOOKING else "INFO"}
