"""What both protocols share: health, reflection, limits, tokens, certificates, and how a server stops."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from google.rpc import error_details_pb2
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

import jaxserve.serving.tls
from jaxserve import ConfigError
from jaxserve.client import Client, ClientTls, ServerError
from jaxserve.serving.grpc.server import serve
from jaxserve.serving.protos.v1 import inference_pb2 as pb
from jaxserve.serving.protos.v1 import inference_pb2_grpc
from jaxserve.serving.protos.vllm import vllm_engine_pb2, vllm_engine_pb2_grpc
from jaxserve.serving.tls import TlsFiles
from tests.serving.certificates import Authority
from tests.serving.grpc.harness import PATIENCE, running, wait_until
from tests.serving.grpc.test_inference import LONG, details, failure, violation

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def test_health_of_each_service(channel):
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", "vllm.grpc.engine.VllmEngine", "jaxserve.v1.Inference"):
        assert health.Check(health_pb2.HealthCheckRequest(service=name)).status == SERVING
    assert failure(lambda: [health.Check(health_pb2.HealthCheckRequest(service="x"))]).code() is (
        grpc.StatusCode.NOT_FOUND)


def test_health_is_watched_from_start_to_end(loop, llm):
    with running(loop, llm, started=False) as server, grpc.insecure_channel(server.target) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        stub = inference_pb2_grpc.InferenceStub(channel)
        assert next(watch).status == NOT_SERVING
        error = failure(lambda: stub.Generate(pb.GenerateRequest(text="a")))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert details(error, error_details_pb2.RetryInfo)
        server.run(server.service.start(llm))
        assert next(watch).status == SERVING
        call = stub.Generate(pb.GenerateRequest(text="a", sampling=LONG))
        first = next(call)
        draining = loop.submit(server.service.drain(PATIENCE))
        assert next(watch).status == NOT_SERVING
        error = failure(lambda: stub.Generate(pb.GenerateRequest(text="a")))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert sum(len(message.token_ids) for message in (first, *call)) == 500, "what runs may end"
        assert draining.result(PATIENCE)


def test_a_client_by_reflection(server, channel):
    """It knows nothing but the port."""
    database = ProtoReflectionDescriptorDatabase(channel)
    assert set(database.get_services()) == {
        "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection", "jaxserve.v1.Inference",
        "vllm.grpc.engine.VllmEngine"}
    pool = descriptor_pool.DescriptorPool(database)
    assert pool.FindServiceByName("vllm.grpc.engine.VllmEngine").methods_by_name["Generate"].server_streaming
    method = pool.FindServiceByName("jaxserve.v1.Inference").methods_by_name["Tokenize"]
    call = channel.unary_unary(f"/{method.containing_service.full_name}/{method.name}",
                               lambda message: message.SerializeToString(),
                               message_factory.GetMessageClass(method.output_type).FromString)
    assert list(call(message_factory.GetMessageClass(method.input_type)(text="abc")).token_ids) == [*b"abc"]


def test_without_reflection(loop, llm):
    with running(loop, llm, with_reflection=False) as server, grpc.insecure_channel(server.target) as channel:
        with pytest.raises(grpc.RpcError):
            ProtoReflectionDescriptorDatabase(channel).get_services()


def test_large_messages_pass_and_larger_ones_do_not(loop, llm, server):  # case 98
    unlimited = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(server.target, unlimited) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        million = pb.TokenIds(ids=[97] * 1_200_000)
        assert len(stub.Detokenize(pb.DetokenizeRequest(token_ids=million.ids)).text) == 1_200_000
        assert violation(failure(lambda: stub.Generate(pb.GenerateRequest(token_ids=million)))) == "prompt"
        error = failure(lambda: stub.Generate(pb.GenerateRequest(text="x" * (65 << 20))))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert list(stub.Tokenize(pb.TokenizeRequest(text="alive")).token_ids) == [*b"alive"]


@pytest.mark.parametrize("method, streams", [("jaxserve.v1.Inference/Generate", True),
                                             ("jaxserve.v1.Inference/Tokenize", False),
                                             ("vllm.grpc.engine.VllmEngine/Generate", True),
                                             ("vllm.grpc.engine.VllmEngine/Abort", False)])
@pytest.mark.parametrize("content", [b"\xff\xff\xff", b"\x0a\x02\xff\xfe"], ids=["no protobuf", "no UTF-8"])
def test_bytes_that_are_no_message(channel, caplog, method, streams, content):
    call = (channel.unary_stream if streams else channel.unary_unary)(f"/{method}")
    with pytest.raises(grpc.RpcError) as caught:
        list(call(content, timeout=PATIENCE))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "the message cannot be read" in caught.value.details()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_the_limit_of_messages_can_be_set(loop, llm):
    with running(loop, llm, max_message_bytes=1000) as server, grpc.insecure_channel(server.target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for text in ("x" * 1100, "é" * 450):  # the second is small enough, but not its answer
            error = failure(lambda text=text: [stub.Tokenize(pb.TokenizeRequest(text=text))])
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert list(stub.Tokenize(pb.TokenizeRequest(text="alive")).token_ids) == [*b"alive"]


def test_prompt_logprobs_of_a_long_prompt(stub):
    request = pb.GenerateRequest(text="x" * 500, sampling=pb.SamplingParams(max_tokens=1, prompt_logprobs=20))
    *_, last = stub.Generate(request)
    first, *others = last.prompt_logprobs
    assert (len(first.entries), len(others)) == (0, 499)
    # The twenty best, and the prompt's own token if it is none of them.
    assert all(len(position.entries) in (20, 21) for position in others)


def test_bearer_tokens(loop, llm):
    with running(loop, llm, tokens=["first", "sécond"]) as server, grpc.insecure_channel(server.target) as channel:
        for token in (None, "", "firs", "firstt", "Bearer first"):
            with Client(server.target, token=token) as client, pytest.raises(ServerError) as caught:
                client.tokenize("a")
            assert caught.value.code == "UNAUTHENTICATED"
        with Client(server.target, token="first") as client:
            assert client.tokenize("a") == [97]
            assert client.generate("a", max_tokens=1, use_tqdm=False)[0].error is None
        stub = inference_pb2_grpc.InferenceStub(channel)
        basic = [("authorization", "Basic first")]
        error = failure(lambda: stub.Generate(pb.GenerateRequest(text="a"), metadata=basic))
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest()).status == SERVING, "probes have no token"
        engine = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        assert engine.HealthCheck(vllm_engine_pb2.HealthCheckRequest()).healthy
        assert failure(lambda: [engine.GetLoads(vllm_engine_pb2.GetLoadsRequest())]).code() is (
            grpc.StatusCode.UNAUTHENTICATED)


def test_who_has_no_token_sends_no_message(loop, llm):
    """They are refused before it is taken: none comes here."""
    never = threading.Event()
    with running(loop, llm, tokens=["first"]) as server, grpc.insecure_channel(server.target) as channel:
        call = channel.stream_unary("/jaxserve.v1.Inference/Tokenize")
        try:
            error = failure(lambda: [call(iter(never.wait, True), timeout=PATIENCE)])
        finally:
            never.set()
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_port_is_not_shared(server, loop):
    with pytest.raises(ConfigError, match="cannot listen"):
        loop.run(serve(server.service, "127.0.0.1", server.server.port))


def test_stopping_lets_calls_end_and_does_not_wait_for_watches(loop, llm):
    with running(loop, llm) as server, grpc.insecure_channel(server.target) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == SERVING
        call = inference_pb2_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(text="a", sampling=LONG))
        first = next(call)
        with concurrent.futures.ThreadPoolExecutor() as reader:
            rest = reader.submit(lambda: sum(len(message.token_ids) for message in call))
            server.run(server.server.stop(grace=10 * PATIENCE))
            assert len(first.token_ids) + rest.result(PATIENCE) == 500


def test_stopping_at_once_ends_requests(loop, llm):
    with running(loop, llm) as server, grpc.insecure_channel(server.target) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(text="a", sampling=LONG))
        next(call)
        server.run(server.server.stop())
        assert failure(lambda: call).code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        server.assert_idle()


def ask(target: str, tls: ClientTls | None) -> None:
    with Client(target, tls=tls, timeout=PATIENCE) as client:
        assert client.tokenize("a") == [97]


def refused(target: str, tls: ClientTls | None) -> bool:
    try:
        ask(target, tls)
    except ServerError as error:
        return error.code == "UNAVAILABLE"
    return False


def test_tls_and_its_renewal(loop, llm, tmp_path, monkeypatch):
    monkeypatch.setattr(jaxserve.serving.tls, "RENEWAL_SECONDS", 0.01)
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    certificate, key = old.sign("server")
    with running(loop, llm, tls=TlsFiles(certificate=certificate, key=key)) as server:
        ask(server.target, ClientTls(ca=old.certificate))
        assert refused(server.target, ClientTls(ca=new.certificate))
        assert refused(server.target, None)
        with Client(server.target, tls=ClientTls(ca=old.certificate), timeout=PATIENCE) as client:
            events = client.stream("a", max_tokens=500, ignore_eos=True)
            begun = next(events)
            new_certificate, new_key = new.sign("server")
            new_certificate.replace(certificate)  # for a moment the two do not fit together
            ask(server.target, ClientTls(ca=old.certificate))
            new_key.replace(key)
            wait_until(lambda: not refused(server.target, ClientTls(ca=new.certificate)))
            assert sum(len(event.token_ids) for event in (begun, *events)) == 500, "what runs may end"
        assert refused(server.target, ClientTls(ca=old.certificate))


def test_a_server_that_has_been_replaced_stops_too(loop, llm, tmp_path):
    """Also if its certificate is being replaced just then, or could not be."""
    authority = Authority(tmp_path / "known")
    certificate, key = authority.sign("server")
    files, tls = TlsFiles(certificate=certificate, key=key), ClientTls(ca=authority.certificate)
    with running(loop, llm, tls=files) as server:
        grpc_server, make = server.server, server.server._make

        def make_broken() -> tuple[grpc.aio.Server, int]:
            new, port = make()
            really_start = new.start

            async def start() -> None:
                await really_start()
                raise RuntimeError("it does not start")

            new.start = start
            return new, port

        grpc_server._make = make_broken
        with pytest.raises(RuntimeError, match="does not start"):
            server.run(grpc_server._replace(files.context()))
        grpc_server._make = make
        ask(server.target, tls)
        with Client(server.target, tls=tls, timeout=PATIENCE) as client:
            events = client.stream("a", max_tokens=500, ignore_eos=True)
            next(events)
            server.run(grpc_server._replace(files.context()))
            server.run(grpc_server.stop())
            with pytest.raises(ServerError):
                list(events)
        server.assert_idle()


def test_stopping_in_the_middle_of_a_renewal(loop, llm, tmp_path, monkeypatch):
    monkeypatch.setattr(jaxserve.serving.tls, "RENEWAL_SECONDS", 0.01)
    authority = Authority(tmp_path / "known")
    certificate, key = authority.sign("server")
    made: list[grpc.aio.Server] = []
    with running(loop, llm, tls=TlsFiles(certificate=certificate, key=key)) as server:
        grpc_server, make, starting = server.server, server.server._make, threading.Event()

        def make_slow() -> tuple[grpc.aio.Server, int]:
            new, port = make()
            start = new.start

            async def start_slowly() -> None:
                await start()
                starting.set()
                await asyncio.Event().wait()

            new.start = start_slowly
            made.append(new)
            return new, port

        grpc_server._make = make_slow
        for target, source in zip((certificate, key), authority.sign("renewed")):
            source.replace(target)
        assert starting.wait(PATIENCE)
        server.run(grpc_server.stop())
        assert refused(server.target, ClientTls(ca=authority.certificate))
        new, = made
        server.run(new.wait_for_termination())


@pytest.mark.slow
def test_renewing_all_the_time(loop, llm, tmp_path, monkeypatch):
    """Handshakes and calls while the certificate changes under them. A call that comes in the moment of the change may
    be lost; the next one is not, and the process lives."""
    monkeypatch.setattr(jaxserve.serving.tls, "RENEWAL_SECONDS", 0.01)
    authority = Authority(tmp_path / "known")
    certificate, key = authority.sign("server")
    tls = ClientTls(ca=authority.certificate)

    def persist() -> None:
        for _ in range(10):
            try:
                return ask(server.target, tls)
            except ServerError as error:
                assert error.code in ("CANCELLED", "UNAVAILABLE")
        raise AssertionError("ten calls in a row were lost")

    with running(loop, llm, tls=TlsFiles(certificate=certificate, key=key)) as server:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            asking = [pool.submit(lambda: [persist() for _ in range(100)]) for _ in range(4)]
            number = 0
            while not all(task.done() for task in asking):
                number += 1
                for target, source in zip((certificate, key), authority.sign(f"renewed-{number}")):
                    source.replace(target)
            for task in asking:
                task.result()
        assert number > 10


def test_mutual_tls(loop, llm, tmp_path):
    authority, stranger = Authority(tmp_path / "known"), Authority(tmp_path / "stranger")
    certificate, key = authority.sign("server")
    with running(loop, llm, tls=TlsFiles(certificate=certificate, key=key,
                                         client_ca=authority.certificate)) as server:
        for signer, welcome in ((authority, True), (stranger, False)):
            client_certificate, client_key = signer.sign("client")
            tls = ClientTls(ca=authority.certificate, certificate=client_certificate, key=client_key)
            assert refused(server.target, tls) is not welcome
        assert refused(server.target, ClientTls(ca=authority.certificate))


def test_tls_files_that_are_missing(server, loop, tmp_path):
    with pytest.raises(ConfigError, match="TLS file"):
        loop.run(serve(server.service, "127.0.0.1", 0, tls=TlsFiles(certificate=tmp_path / "no", key=tmp_path / "no")))


def test_channelz_is_there_when_asked_for(loop, llm, server):
    def servers(target: str) -> int:
        with grpc.insecure_channel(target) as channel:
            stub = channelz_pb2_grpc.ChannelzStub(channel)
            return len(stub.GetServers(channelz_pb2.GetServersRequest()).server)

    with running(loop, llm, with_channelz=True) as debugged:
        assert servers(debugged.target) >= 1
    assert failure(lambda: [servers(server.target)]).code() is grpc.StatusCode.UNIMPLEMENTED
