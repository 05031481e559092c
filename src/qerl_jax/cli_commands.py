"""The commands of `qerl`: what each does, an example of it, and its arguments."""

from qerl_jax.cli_parse import Command, argument, number

_COUNT, _COUNT_OR_NONE = number(int, "[1, inf)"), number(int, "[0, inf)")
_CONFIG = argument("config", metavar="CONFIG", nargs="?", help="YAML file, e.g. from configs/")
_OUT_DIR = argument("out", metavar="OUT_DIR", help="folder to write")
_ADAPTER = argument("--adapter", metavar="DIR", help="folder of a PEFT adapter")
_MODEL = argument(
    "--model", metavar="DIR", required=True, help="Hugging Face folder, or tiny: the embedded model"
)
_QUANTIZE = argument(
    "--quantize", action="store_true", help="quantize the linear weights to NVFP4 first"
)

_DTYPE = argument(
    "--dtype",
    choices=("float32", "bfloat16"),
    default="float32",
    help="of activations and matmuls; default: float32",
)

_TRAIN = (
    _CONFIG,
    argument("--print-config", action="store_true", help="print the whole config and stop"),
    argument("--dry-run", action="store_true", help="build and check everything, train nothing"),
    argument("--resume", action="store_true", help="go on from the last checkpoint of the run"),
    argument("--overwrite", action="store_true", help="replace the run in the folder, if any"),
    argument(
        "--stop-after",
        metavar="N",
        type=_COUNT,
        help="save and stop after N steps of this call; --resume goes on",
    ),
    argument("-q", "--quiet", action="store_true", help="print only the run folder"),
)

_EVAL = (
    _CONFIG,
    _ADAPTER,
    argument("--split", choices=("eval", "train"), default="eval", help="default: eval"),
    argument("--limit", metavar="N", type=_COUNT, help="only the first N problems"),
    argument("--out", metavar="FILE", help="JSONL: the report, then each completion"),
)

_SCORE = (
    _MODEL,
    _ADAPTER,
    _QUANTIZE,
    _DTYPE,
    argument(
        "--in",
        dest="input",
        metavar="FILE",
        required=True,
        help='JSONL rows {"text": "..."} or {"ids": [1, 2]}; - is standard input',
    ),
    argument(
        "--out",
        dest="output",
        metavar="FILE",
        default="-",
        help="JSONL of ids, logprobs (of ids[1:]), nll (their negative sum); -, the default, is "
        "standard output",
    ),
    argument(
        "--top-k",
        metavar="N",
        type=_COUNT_OR_NONE,
        default=0,
        help="write the N largest logits of each position too; default: 0",
    ),
    argument(
        "--temperature",
        metavar="T",
        type=number(float, "[0.001, inf)"),
        default=1.0,
        help="divides the logits before the log-softmax; default: 1",
    ),
)

_SAMPLING = (
    argument("--max-tokens", metavar="N", type=_COUNT, default=64, help="default: 64"),
    argument(
        "--temperature",
        metavar="T",
        type=number(float, "0 or [0.001, inf)"),
        default=0.0,
        help="0, the default, is greedy",
    ),
    argument("--top-k", metavar="N", type=_COUNT_OR_NONE, default=0, help="default: 0, off"),
    argument(
        "--top-p",
        metavar="P",
        type=number(float, "[0.000001, 1]"),
        default=1.0,
        help="default: 1, off",
    ),
    argument(
        "--min-p", metavar="P", type=number(float, "[0, 1)"), default=0.0, help="default: 0, off"
    ),
    argument(
        "--seed", metavar="N", type=number(int, "[0, 4294967295]"), default=0, help="default: 0"
    ),
    argument(
        "-n",
        metavar="N",
        type=_COUNT,
        default=1,
        help="completions of each prompt; default: 1",
    ),
)

_GENERATE = (
    _MODEL,
    _ADAPTER,
    _QUANTIZE,
    _DTYPE,
    argument(
        "--prompt",
        dest="prompts",
        metavar="TEXT",
        nargs="+",
        action="extend",
        help="one prompt or more",
    ),
    argument(
        "--in",
        dest="input",
        metavar="FILE",
        help='JSONL rows {"prompt": "..."}; - is standard input',
    ),
    argument("--chat", action="store_true", help="wrap each prompt in the chat template"),
    *_SAMPLING,
)

_QUANTIZE_COMMAND = (
    _MODEL,
    argument("--out", metavar="DIR", required=True, help="folder to write"),
    argument(
        "--scale-rounding",
        choices=("float32", "bfloat16"),
        default="float32",
        help="precision of the scale arithmetic; default: float32",
    ),
)

_CONVERT = (
    argument("gguf", metavar="FILE.gguf", help="file to read"),
    _OUT_DIR,
    argument("--tie", action="store_true", help="the output head is the embedding"),
)

_EXPORT_ADAPTER = (
    argument("run_dir", metavar="RUN_DIR", help="folder of a training run"),
    _OUT_DIR,
    argument("--step", metavar="N", type=_COUNT_OR_NONE, help="a saved step; default: the last"),
)

COMMANDS = {
    "train": Command(
        "Train an adapter by reinforcement learning, as a config says.",
        "qerl train configs/quickstart.yaml --optimizer.learning_rate 3e-5 --run_dir runs/mine",
        _TRAIN,
        overrides=True,
    ),
    "eval": Command(
        "Measure the accuracy of a model, or of an adapter on it, on a config's problems.",
        "qerl eval configs/quickstart.yaml --adapter adapters/mine --limit 100",
        _EVAL,
        overrides=True,
    ),
    "score": Command(
        "Write the log-probability of every token of texts or of token ids.",
        """echo '{"text": "2+2=4"}' | qerl score --model tiny --in - --top-k 5""",
        _SCORE,
    ),
    "generate": Command(
        "Complete prompts and print a line of JSON for each completion.",
        'qerl generate --model tiny --prompt "12+7=" "3+5=" -n 4 --temperature 0.7',
        _GENERATE,
    ),
    "quantize": Command(
        "Write a model folder whose linear weights are in NVFP4.",
        "qerl quantize --model models/Qwen2.5-1.5B-Instruct --out models/Qwen2.5-1.5B-NVFP4",
        _QUANTIZE_COMMAND,
    ),
    "convert": Command(
        "Turn a GGUF file into a Hugging Face folder.",
        "qerl convert smollm2-135m-instruct.gguf models/smollm2-135m",
        _CONVERT,
    ),
    "export-adapter": Command(
        "Write the adapter of a run in PEFT format.",
        "qerl export-adapter runs/mine adapters/mine --step 100",
        _EXPORT_ADAPTER,
    ),
}
