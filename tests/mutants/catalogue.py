"""All mutants by name."""

from tests.mutants import mutants, optimizer_mutants

assert optimizer_mutants.MUON  # the import registers its mutants
MUTANTS = mutants.MUTANTS
