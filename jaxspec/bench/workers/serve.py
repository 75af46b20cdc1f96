"""Runs in another system's environment: the first line of input names a model to load, the others are prompts."""

import importlib
import json
import os
import sys
import traceback


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps what libraries print out of the answers
    peer = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if peer is None:
                peer = importlib.import_module(f"{sys.argv[1]}_peer").Peer(request)
                answer = {"versions": peer.versions}
            else:
                answer = peer.decode(request["tokens"], request["count"], request["ignore_eos"])
        except Exception as error:  # an error of any library; its traceback goes to the log
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
