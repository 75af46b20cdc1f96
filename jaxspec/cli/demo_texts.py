"""What the demo has written: an ordinary question, and a text that is mostly copied."""

QUESTION = "Why is the sky blue during the day, and why are sunsets red?"
CODE = """\
def read_scores(path):
    scores = []
    with open(path) as file:
        for line in file:
            name, score = line.strip().split(",")
            scores.append((name, int(score)))
    return scores


def find_best(scores):
    best = scores[0]
    for name, score in scores:
        if score > best[1]:
            best = (name, score)
    return best


def find_worst(scores):
    worst = scores[0]
    for name, score in scores:
        if score < worst[1]:
            worst = (name, score)
    return worst


def mean_score(scores):
    total = 0
    for name, score in scores:
        total = total + score
    return total / len(scores)


def print_report(path):
    scores = read_scores(path)
    print("Number of players:", len(scores))
    print("Mean score:", mean_score(scores))
    name, score = find_best(scores)
    print("Best player:", name, "with", score)
    name, score = find_worst(scores)
    print("Worst player:", name, "with", score)


print_report("scores.csv")
"""
COPYING = (
    f"Repeat this code with one change: rename the function `mean_score` to `average_score`.\n\n```python\n{CODE}```"
)
TASKS = {"an ordinary question": (QUESTION, 96), "repeating code with one change": (COPYING, 256)}
