"""Writes what the documentation takes from the code: the tables of members and the pictures.

python -m scripts.docs
"""

from scripts.docs import members, pictures

members.main()
pictures.main()
