"""`asyncrl check`: proves from the files of a run that every sample is accounted for."""
