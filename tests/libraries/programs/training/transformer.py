"""flax nnx: modules and an optimizer that the step changes in place, BatchNorm, Dropout with a stream of keys."""

import training_programs
from program_edits import edits

SOURCES = (training_programs.__file__,)


def main():
    trained = training_programs.transformer(edits.wrap)
    print("losses", trained.losses)
    return trained.leaves, trained.losses
