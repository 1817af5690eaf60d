"""jaxserve as one more engine in the comparison runner.

The runner has a module `common` and calls scripts in its own directory, so:
`run_all.py --add 'jaxserve-f32|PYTHON /path/to/scripts/peer_jaxserve.py --precision f32'`. Engine options
follow as `--engine NAME=VALUE`. Nothing of jaxserve imports this file.
"""

from __future__ import annotations

import ast
import os
import sys

sys.path.insert(0, os.getcwd())

import common  # noqa: E402  (the runner's; its directory is the working directory)

DTYPES = {"f32": "float32", "bf16": "bfloat16"}


def engine_option(text: str) -> tuple[str, object]:
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def load(args):
    import jax

    from jaxserve import LLM, SamplingParams

    options = {"max_model_len": 2048, "max_num_seqs": args.max_seqs, **dict(args.engine)}
    llm = LLM(args.model, dtype=DTYPES[args.precision], **options)

    def gen(prompts, max_tokens):
        params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
                  for count in max_tokens]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        for output in outputs:
            if output.error is not None:
                raise output.error
        return [output.outputs[0].token_ids for output in outputs]

    return gen, {"version": f"jax {jax.__version__}, Python {sys.version.split()[0]}", "options": options,
                 "prefix_caching": llm.config.enable_prefix_caching}


if __name__ == "__main__":
    parser = common.args_parser()
    parser.add_argument("--engine", type=engine_option, action="append", default=[], metavar="NAME=VALUE",
                        help="an engine option, for example max_num_batched_tokens=1024")
    common.run("jaxserve", load, parser)
