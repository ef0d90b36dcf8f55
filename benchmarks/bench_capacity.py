"""How many requests a memory holds: vLLM's geometry beside what the optimizer finds, and how long that takes.

    python benchmarks/bench_capacity.py [--memory 80GiB] [--write docs/images]

Prints a Markdown table. With `--write`, draws the pictures of `docs/capacity.md` and of the README into a folder.
Every count is confirmed by the manager with `--prove`, which takes about a minute.
"""

import argparse
import pathlib
import time

from dsv4kv_jax import picture, plots
from dsv4kv_jax.cli._options import parse_size
from dsv4kv_jax.config import PRESETS
from dsv4kv_jax.optimize import Optimized, optimize
from dsv4kv_jax.plan import plan
from dsv4kv_jax.proof import count_admitted

LENGTHS = (1024, 2048, 8192, 32_768, 131_072, 1_048_576)
SEARCHES = (("vllm", False), ("flashmla", False), ("flashmla", True), ("free", False), ("free", True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", default="80GiB")
    parser.add_argument("--prove", action="store_true")
    parser.add_argument("--write", metavar="FOLDER")
    arguments = parser.parse_args()
    memory = parse_size(arguments.memory)
    names = [f"{compatible}{', pools' if several else ''}" for compatible, several in SEARCHES]
    print(f"| model | tokens | vLLM's geometry | {' | '.join(names)} | search, ms |")
    print("|" + "---|" * (len(names) + 4))
    for model, config in PRESETS.items():
        for length in LENGTHS:
            started = time.perf_counter()
            found = [optimize(config, memory, length, compatible=c, several_pools=s) for c, s in SEARCHES]
            elapsed = 1000 * (time.perf_counter() - started) / len(found)
            if arguments.prove:
                check(found, length)
            cells = [f"{one.num_requests:,} ({one.gain:.2f}x)" for one in found]
            print(
                f"| {model} | {plots.short_tokens(length)} | {found[0].default_requests:,} | {' | '.join(cells)} "
                f"| {elapsed:.0f} |",
                flush=True,
            )
    if arguments.write:
        write_pictures(pathlib.Path(arguments.write), memory)


def check(found: list[Optimized], length: int) -> None:
    for one in found:
        counted = count_admitted(one.pools, length, one.schedule)
        assert counted == one.num_requests, f"{one.compatible}: {one.num_requests} promised, {counted} admitted"


def write_pictures(folder: pathlib.Path, memory: int) -> None:
    """slab.svg (the default slab), slab_optimized.svg, capacity.svg and bytes_read.svg, for Pro."""
    folder.mkdir(parents=True, exist_ok=True)
    config = PRESETS["deepseek-v4-pro"]
    default = plan(config, memory)
    slab, pools = (optimize(config, memory, 2048, several_pools=several) for several in (False, True))
    lines = {
        "vLLM's geometry": [default],
        "one slab, tuned for 2K": slab.pools,
        "separate pools, tuned for 2K": pools.pools,
    }
    picture.save(picture.draw(default), str(folder / "slab.svg"))
    marked = picture.draw(default, layer="model.layers.30.attn", token=100_000)
    picture.save(marked, str(folder / "slab_address.svg"))
    picture.save(picture.draw(slab.plan), str(folder / "slab_optimized.svg"))
    picture.save(plots.plot_capacity(lines, 1 << 20), str(folder / "capacity.svg"))
    picture.save(plots.plot_bytes_read(default, 1 << 20), str(folder / "bytes_read.svg"))


if __name__ == "__main__":
    main()
