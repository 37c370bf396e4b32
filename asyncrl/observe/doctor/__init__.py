"""`asyncrl doctor`: facts about this machine (`gather`), and what is wrong with them (`checks`)."""
