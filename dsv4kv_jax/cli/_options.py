"""What all commands share: sizes, the options that describe a plan, errors in one line."""

import functools
import inspect
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

import click

from dsv4kv_jax import _json
from dsv4kv_jax.config import PRESETS, ModelConfig
from dsv4kv_jax.errors import PlanError
from dsv4kv_jax.plan import DEFAULT_IN_FLIGHT_TOKENS, KVCachePlan, plan, plan_from_specs
from dsv4kv_jax.plan_json import specs_from_json
from dsv4kv_jax.specs import CACHE_MODES

_UNITS = {"": 1, "B": 1} | {f"{p}iB": 1024 ** (i + 1) for i, p in enumerate("KMGT")}
_UNITS |= {f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")}


def parse_size(text: str) -> int:
    """A size in bytes: an integer, or a decimal number with KiB/MiB/GiB/TiB (1024) or KB/MB/GB/TB (1000).

    Raises:
      PlanError: anything else, or a fraction of a byte.
    """
    match = re.fullmatch(r"\s*(-?[0-9]{1,40})(?:\.([0-9]{1,40}))?\s*([A-Za-z]*)\s*", text)
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    if not match or match[3].lower() not in units:
        raise PlanError(
            f"memory size {text!r} is not a size; write bytes, or a number with KiB, MiB, GiB, KB, MB or GB"
        )
    whole, fraction, unit = match[1], match[2] or "", match[3].lower()
    digits = int(whole + fraction)  # exact: no float between the text and the bytes
    value, rest = divmod(digits * units[unit], 10 ** len(fraction))
    if rest and units[unit] == 1:
        raise PlanError(f"memory size {text!r} is not a whole number of bytes")
    return value


def run(command: click.Command) -> None:
    """Runs the command line: bad input gives one line on stderr and exit code 2, never a traceback."""
    try:
        code = command.main(standalone_mode=False)
    except click.exceptions.Abort:
        _fail("interrupted")
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f" (try '{context.command_path} --help')" if context is not None else ""
        _fail(error.format_message() + hint)
    except (ValueError, OSError) as error:
        _fail(str(error))
    else:
        sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> None:
    click.echo(f"dsv4kv: error: {' '.join(message.split())}", err=True)
    sys.exit(2)


def resolve_model(model: str) -> ModelConfig:
    """A preset's name, or the path of a `config.json` or of the folder that holds one."""
    if model.lower() in PRESETS:
        return ModelConfig.preset(model)
    if not pathlib.Path(model).exists():
        raise PlanError(f"--model {model!r} is neither a preset ({', '.join(sorted(PRESETS))}) nor a file")
    return ModelConfig.from_hf(model)


_OPTIONS = [
    click.option("--model", metavar="PRESET|PATH", help=f"A preset ({', '.join(sorted(PRESETS))}) or a config.json."),
    click.option("--specs", metavar="FILE", help="A JSON list of cache specs instead of a model."),
    click.option(
        "--memory", metavar="SIZES", help="Cache memory per worker, such as 10GiB; a comma list gives one each."
    ),
    click.option("--cache-dtype", type=click.Choice(list(CACHE_MODES)), default="fp8_ds_mla", show_default=True),
    click.option("--indexer", type=click.Choice(["fp8", "mxfp4"]), default="fp8", show_default=True),
    click.option("--draft", type=click.Choice(["none", "mtp", "dspark"]), default="none", show_default=True),
    click.option(
        "--block-size", type=int, metavar="TOKENS", help="Tokens per block of compressed caches. [default: 256]"
    ),
    click.option(
        "--max-model-len", type=int, metavar="TOKENS", help="Refuse a plan that cannot admit one such request."
    ),
    click.option(
        "--max-in-flight-tokens", type=int, metavar="TOKENS", default=DEFAULT_IN_FLIGHT_TOKENS, show_default=True
    ),
    click.option("--num-gpu-blocks-override", type=int, metavar="N", help="Plan N blocks whatever the memory."),
    click.option("--pipeline-stages", type=int, metavar="N", help="[default: 1]"),
    click.option("--tensor-parallel", type=int, metavar="N", help="Workers per stage. [default: from --memory]"),
    click.option("--no-hybrid", is_flag=True, help="Keep every block of every layer, in one group."),
]


def plan_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: adds the options that describe a plan and passes `make_plan`, a function that makes it.

    `make_plan(default_memory=None)` takes the bytes to use where the user gave no `--memory`.
    """

    @functools.wraps(function)
    def wrapper(**kwargs: Any) -> Any:
        values = {name: kwargs.pop(name) for name in _PLAN_ARGUMENTS}
        return function(make_plan=functools.partial(_plan_from_options, **values), **kwargs)

    result: Callable[..., Any] = wrapper
    for option in reversed(_OPTIONS):
        result = option(result)
    return result


def _plan_from_options(
    *,
    default_memory: int | None = None,
    model: str | None,
    specs: str | None,
    memory: str | None,
    cache_dtype: Any,
    indexer: Any,
    draft: Any,
    block_size: int | None,
    max_model_len: int | None,
    max_in_flight_tokens: int,
    num_gpu_blocks_override: int | None,
    pipeline_stages: int | None,
    tensor_parallel: int | None,
    no_hybrid: bool,
) -> KVCachePlan:
    if (model is None) == (specs is None):
        raise PlanError("give one of --model PRESET|PATH and --specs FILE")
    sizes: int | list[int]
    if memory is not None:
        sizes = [parse_size(size) for size in memory.split(",")]
    elif num_gpu_blocks_override is not None:
        sizes = 0  # replaced by the override
    elif default_memory is not None:
        sizes = default_memory
    else:
        raise PlanError("give --memory SIZE, the bytes that each worker has for its cache, such as --memory 10GiB")
    common: dict[str, Any] = {
        "max_model_len": max_model_len,
        "max_in_flight_tokens": max_in_flight_tokens,
        "num_gpu_blocks_override": num_gpu_blocks_override,
        "tensor_parallel": tensor_parallel,
        "hybrid": not no_hybrid,
    }
    if model is not None:
        if block_size is not None:
            common["block_size"] = block_size
        return plan(
            resolve_model(model),
            sizes,
            cache_dtype=cache_dtype,
            indexer=indexer,
            draft=draft,
            pipeline_stages=1 if pipeline_stages is None else pipeline_stages,
            **common,
        )
    assert specs is not None
    try:
        text = pathlib.Path(specs).read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"cannot read --specs {specs!r}: {error.strerror}") from None
    except ValueError as error:
        raise PlanError(f"--specs {specs!r} is not text: {error}") from None
    arguments = specs_from_json(_json.parse(text, f"--specs {specs!r}"))
    if pipeline_stages is not None and pipeline_stages != len(arguments["specs"]):
        raise PlanError(
            f"--pipeline-stages {pipeline_stages} does not fit --specs, which describes {len(arguments['specs'])} "
            f"stages: the file decides, drop the option"
        )
    stages = arguments.pop("specs")
    return plan_from_specs(stages, sizes, block_size=block_size, model=pathlib.Path(specs).stem, **arguments, **common)


_PLAN_ARGUMENTS = tuple(inspect.signature(_plan_from_options).parameters.keys() - {"default_memory"})
