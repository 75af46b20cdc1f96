"""Prompts of the demo and the benchmark: an ordinary question, and requests to repeat a text with one change."""

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
LETTER = """\
Dear Ms Lindqvist,

Thank you for your letter of 3 March about the water in the cellar of the house at 14 Mill Lane. Our plumber came on
Tuesday, found a cracked pipe behind the boiler, and put in a new one the same day. The cellar was dry again on
Thursday. The wall behind the shelves must still be painted; a painter will come next Monday between nine and twelve.

You need not be at home, as the caretaker will let him in. Should anything be wrong afterwards, please call the
caretaker on the number that hangs in the hall.

With kind regards,
Tomas Brandt
"""
STORY = """\
The lighthouse stood on a rock that was dry for two hours a day. Every evening the keeper climbed the ninety-one steps,
wiped the salt from the glass and lit the lamp. Then she wrote down the wind, the waves and the ships, for nobody had
told her to stop. In winter the supply boat came once a month, if it came at all, and brought flour, oil and the
newspapers of four weeks. She read them in their order, one a day, so that her news was always exactly a month old.
"""
TABLE = """\
| city      | country | river   | founded |
|-----------|---------|---------|---------|
| Vienna    | Austria | Danube  | 15 BC   |
| Prague    | Czechia | Vltava  | 870     |
| Budapest  | Hungary | Danube  | 1873    |
| Warsaw    | Poland  | Vistula | 1300    |
| Paris     | France  | Seine   | 250 BC  |
| London    | England | Thames  | 47      |
| Rome      | Italy   | Tiber   | 753 BC  |
| Cologne   | Germany | Rhine   | 38 BC   |
"""
SETTINGS_TEXT = """\
{
  "server": {"host": "localhost", "port": 8080, "workers": 4, "timeout_s": 30},
  "database": {"host": "localhost", "port": 5432, "name": "orders", "pool": 10},
  "cache": {"host": "localhost", "port": 6379, "size_mb": 256, "timeout_s": 5},
  "log": {"level": "info", "file": "orders.log", "keep_days": 14},
  "mail": {"host": "localhost", "port": 25, "sender": "shop@example.com"}
}
"""
COPY_PROMPT = (
    f"Repeat this code with one change: rename the function `mean_score` to `average_score`.\n\n```python\n{CODE}```"
)
COPY_TASKS = {  # by name: the category, and the text
    "rename": ("code", COPY_PROMPT),
    "constant": ("code", f"Repeat this code, but let the scores be read from games.csv.\n\n```python\n{CODE}```"),
    "letter": ("prose", f"Repeat this letter, but let the painter come on Wednesday.\n\n{LETTER}"),
    "name": ("prose", f"Repeat this letter with one change: sign it with the name Anna Weber.\n\n{LETTER}"),
    "story": ("prose", f"Repeat this story, but make it a hundred and two steps.\n\n{STORY}"),
    "table": ("data", f"Repeat this table, and add a row for Lisbon at its end.\n\n{TABLE}"),
    "settings": (
        "data",
        f"Repeat these settings, but let the server listen on port 9090.\n\n```json\n{SETTINGS_TEXT}```",
    ),
    "log": ("data", f"Repeat these settings with one change: keep the log for 30 days.\n\n```json\n{SETTINGS_TEXT}```"),
}
DEMO_TASKS = {"an ordinary question": (QUESTION, 96), "repeating code with one change": (COPY_PROMPT, 256)}
