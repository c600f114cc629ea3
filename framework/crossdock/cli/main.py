"""Entry of the ``crossdock`` command: one line on stderr for an error, exit 2 for configuration and usage, 1 at run time."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import cyclopts

from crossdock.cli.app import COMMANDS, build_app
from crossdock.cli.familiar import translate_familiar_flags
from crossdock.errors import CrossdockError

TRACEBACK_FLAG = "--traceback"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit code. ``--traceback`` lets an unexpected exception through."""
    words = list(sys.argv[1:] if argv is None else argv)
    show_traceback = TRACEBACK_FLAG in words
    words = [word for word in words if word != TRACEBACK_FLAG]
    try:
        return _run(words)
    except CrossdockError as error:
        return _fail(str(error), error.exit_code)
    except cyclopts.CycloptsError as error:
        return _fail(_usage_message(error), 2)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader is gone: nothing more can be told
        return 1
    except Exception as error:
        if show_traceback:
            raise
        return _fail(f"unexpected {type(error).__name__}: {error} (run again with {TRACEBACK_FLAG} for the stack)", 1)


def _run(words: list[str]) -> int:
    command = COMMANDS.get(words[0]) if words else None
    if command is not None and command.takes_familiar_flags:
        words = translate_familiar_flags(words)
    result = build_app(words)(words, exit_on_error=False, print_error=False)
    return result if isinstance(result, int) else 0


def _usage_message(error: cyclopts.CycloptsError) -> str:
    return str(error)


def _fail(message: str, exit_code: int) -> int:
    print(f"crossdock: {' '.join(message.split())}", file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
