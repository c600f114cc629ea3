"""What ``overlap.py`` is called with."""

from __future__ import annotations

import argparse


def arguments_of_call() -> argparse.Namespace:
    """The command line of this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only to try the script")
    parser.add_argument("--dispatcher", default="nvlink")
    parser.add_argument("--options", default="{}", help="of the dispatcher, JSON")
    parser.add_argument("--experts", default="auto")
    parser.add_argument("--keep-sms", action="store_true", help="experts take all multiprocessors beside transfers")
    parser.add_argument("--fp8", action="store_true", help="weights in fp8 blocks")
    parser.add_argument("--heads", type=int, default=0, help="attention heads, where not those of the shape")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", default="4096,16384")
    parser.add_argument("--decode-rows", type=int, default=128)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5, help="turns of each way that count")
    parser.add_argument("--in-a-row", type=int, default=3, help="passes of a turn, of which the first does not count")
    parser.add_argument("--held-gbps", type=float, default=50.0, help="rate of the held link; 0 leaves it out")
    parser.add_argument("--held-only", action="store_true", help="nothing over the link as it is")
    parser.add_argument("--short", action="store_true", help="without single_batch")
    parser.add_argument("--traces", default="", help="folder for the operations of each way, one file a rank")
    parser.add_argument("--kernels", action="store_true", help="there, too, the kernels of an overlapped pass")
    parser.add_argument(
        "--shared-gpu", action="store_true", help="all ranks on one GPU, under MPS: the mechanism, no figures"
    )
    parser.add_argument("--pauses-ms", default="", help="only sequential passes with so long pauses between them")
    return parser.parse_args()
