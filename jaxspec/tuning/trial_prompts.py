"""The prompts on which `jaxspec.tuning.auto` compares drafters if the user gives none of their own."""

TRIAL_PROMPTS = (
    "Explain to a child of ten why the moon looks different every night.",
    "I have three days in a small town by the sea, and it will rain. What should I do? Give me a plan for every day.",
    "Write a Python function that reads a CSV file and returns the mean of each numeric column. Explain it.",
    "A baker sells 14 loaves before noon and half as many after noon. Each loaf costs 3 dollars. How much does she "
    "earn in a week of six days? Think step by step.",
    "Write a short letter to a neighbour whose dog barks at night. Be friendly, and suggest two things to try.",
    "Correct the spelling of this text, and change nothing else:\n\nThe libary is open from nine to five, and on "
    "wensday until eight. Books can be borowed for four weeks. If a book is late, the libary sends a letter. Children "
    "under twelve need a card that one of their parents has sined. Quiet rooms can be reserved at the desk.",
)
"""Six requests: two questions, code, arithmetic, a letter, and a text that is repeated with few changes."""
