"""The label of a place where nothing is predicted, as in torch's cross entropy."""

IGNORED_LABEL = -100
