import os
import time

from distlab.comm import PeerLost


def basic(ctx):
    s = ctx.store
    e = ctx.endpoint
    n = []
    s.set(f"a{ctx.rank}", b"%d" % ctx.rank)
    s.wait([f"a{r}" for r in range(ctx.world_size)])

    def handle(p, m):
        n.append(p)
        return b"%d:" % p + m

    if ctx.rank == 0:
        e.serve(handle)
    r = e.call(0, b"hi", 5) if ctx.rank else b""
    t = time.perf_counter()
    if ctx.rank == 1:
        for i in range(1000):
            e.call(0, b"x", 5)
    us = (time.perf_counter() - t) * 1e3
    ctx.comm.barrier()
    return [r.decode(), s.add("k", 1), round(us), len(n), threads()]


def threads():
    return len(os.listdir("/proc/self/task"))


def mortal(ctx):
    s = ctx.store
    e = ctx.endpoint
    if ctx.rank == 0:

        def handle(p, m):
            with open("log", "ab") as f:
                f.write(m)
                f.flush()
                os.fsync(f.fileno())
            return open("log", "rb").read()

        e.serve(handle)
        s.set(f"up{ctx.life}", b"1")
        s.get("over")
        return ctx.life
    got = []
    got.append(e.call(0, b"a", 5).decode())
    ctx.report("kill")
    try:
        while True:
            e.call(0, b"", 5)
    except PeerLost:
        got.append("lost")
    ctx.report("restart")
    s.get("up1")
    got.append(e.call(0, b"b", 5).decode())
    s.set("over", b"1")
    return got


def nothing(ctx):
    return None
