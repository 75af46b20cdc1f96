"""Runs in a peer's environment: loads a model as told by the first line, and continues the prompts of the others."""

import importlib
import json
import os
import sys
import traceback


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    peer = None
    for line in sys.stdin:
        told = json.loads(line)
        try:
            if peer is None:
                peer = importlib.import_module(f"{sys.argv[1]}_peer").Peer(told)
                answer = {"versions": peer.versions}
            else:
                answer = peer.decode(told["tokens"], told["count"], told["ignore_eos"])
        except Exception as error:  # whatever a library raises; the log has all of it
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
