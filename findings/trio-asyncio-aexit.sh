#!/bin/sh
# trio-asyncio skips the __aexit__ of a block that is canceled.
#
# Expected: `async with aio_as_trio(resource)` is asyncio's `async with resource`, for use in a task
#     of trio: however the block ends, __aexit__ runs, at least up to its first wait, as in asyncio
#     and in trio.
# Happens:  if the block ends because its cancel scope is canceled, no line of __aexit__ runs, nor
#     of the `finally` of a generator under asynccontextmanager.  What __aexit__ closes without
#     waiting stays open.  aio_as_trio runs it as a task of asyncio, and cancels that task before
#     its first step.  After an exception, and at the end of the block, it runs.
# Versions: trio-asyncio 0.16.0, trio 0.35.0.
# Affects:  programs of trio that use sockets, sessions or connections of asyncio.  Write what uses
#     them as one function of asyncio, with the `async with` in it, and call that by aio_as_trio: it
#     is canceled like any task of asyncio, in the middle of its block.
. "$(dirname "$0")/lib.sh"

wheels trio-asyncio==0.16.0 trio==0.35.0
python <<'END'
import asyncio
import contextlib
from importlib.metadata import version

import trio
import trio_asyncio
from trio_asyncio import aio_as_trio


class Resource:
    def __init__(self):
        self.closed = False

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc_info):
        self.closed = True


@contextlib.asynccontextmanager
async def generator():
    resource = Resource()
    try:
        yield resource
    finally:
        resource.closed = True


def said(how, resource):
    print(f"{how}: {'closed' if resource.closed else 'open'}")


async def main():
    for make in (Resource, generator):
        name = make.__name__
        async with aio_as_trio(make()) as resource:
            pass
        said(f"{name}, end of the block", resource)
        with contextlib.suppress(ValueError):
            async with aio_as_trio(make()) as resource:
                raise ValueError
        said(f"{name}, exception", resource)
        with trio.CancelScope() as scope:
            async with aio_as_trio(make()) as resource:
                scope.cancel()
                await trio.sleep_forever()
        said(f"{name}, canceled", resource)

    kept = []

    async def work():
        async with Resource() as resource:
            kept.append(resource)
            await asyncio.Event().wait()

    with trio.move_on_after(0.2):
        await aio_as_trio(work)()
    said("a function of asyncio, canceled", kept[0])


print("trio-asyncio", version("trio-asyncio"), "trio", version("trio"))
trio_asyncio.run(main)
END
for kind in Resource generator; do
    expect "$kind: the end of the block closes it" "^$kind, end of the block: closed"
    expect "$kind: an exception closes it" "^$kind, exception: closed"
    expect "$kind: a cancellation leaves it open" "^$kind, canceled: open"
done
expect "in a function of asyncio a cancellation closes it" "^a function of asyncio, canceled: closed"
as_described
