"""Asks a program's gRPC health: `python -m common.rpc.probe HOST:PORT [SERVICE]` exits with 0 if it is SERVING."""

from __future__ import annotations

import argparse
import asyncio
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.rpc.tls import PLAIN_TEXT, Dialling, TlsError, channel_credentials

# A program that is just starting is looked at again soon, not after gRPC's usual seconds.
_OPTIONS = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500)]
CHECK_TIMEOUT_S = 3.0


async def wait_until_serving(address: str, service: str = "", dialling: Dialling = PLAIN_TEXT) -> None:
    """Returns once the service (empty: the whole server) says SERVING, however long the server takes to appear.

    The caller bounds the wait. Raises grpc.aio.AioRpcError if the server answers with anything but a broken connection.
    """
    request = health_pb2.HealthCheckRequest(service=service)
    async with dialling.channel(address, _OPTIONS) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            try:
                async for answer in stub.Watch(request, wait_for_ready=True):
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise


async def check(address: str, service: str = "", dialling: Dialling = PLAIN_TEXT) -> str:
    """The name of the status now, or of the gRPC error that came instead."""
    async with dialling.channel(address, _OPTIONS) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=CHECK_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def main() -> None:
    """Prints the status; exits with 1 if it is not SERVING."""
    parser = argparse.ArgumentParser(description="Ask a server's gRPC health.")
    parser.add_argument("address", help="host:port")
    parser.add_argument("service", nargs="?", default="", help="full service name; the whole server if left out")
    parser.add_argument("--tls-ca", default="", help="PEM file of the server's authorities; without it, plain text")
    parser.add_argument("--tls-cert", default="", help="PEM file of the certificate to show, if one is asked for")
    parser.add_argument("--tls-key", default="", help="PEM file of its private key")
    parser.add_argument("--tls-name", default="", help="name in the certificate; the host if left out")
    arguments = parser.parse_args()
    dialling = PLAIN_TEXT
    if arguments.tls_ca:
        try:
            files = (arguments.tls_ca, arguments.tls_cert, arguments.tls_key)
            dialling = Dialling(channel_credentials(*files), arguments.tls_name)
        except TlsError as error:
            parser.error(str(error))
    status = asyncio.run(check(arguments.address, arguments.service, dialling))
    print(status)
    sys.exit(0 if status == "SERVING" else 1)


if __name__ == "__main__":
    main()
