"""Rules about the two ways to ask for a rotation: that of multi-latent attention, and that of all other."""

from tests.helpers.check_cases_parallel import Case

MLA = "--multi-latent-attention --no-group-query-attention"
YARN = "--position-embedding-type yarn"


ROTATION_CASES = (
    Case(
        "latent_attention_rotates_its_own_way",
        f"{MLA} --rotary-seq-len-interpolation-factor 2",
        "do not exist in multi-latent attention",
        f"{MLA} --rotary-seq-len-interpolation-factor 1",
    ),
    Case("rotation_has_one_kind", "--rope-type yarn", "does not go with rope positions", f"{YARN} --rope-type yarn"),
    Case("rotation_has_one_kind", f"{YARN} --rope-type rope", "does not go with yarn positions", "--rope-type rope"),
    Case(
        "yarn_starts_from_one_length",
        f"{MLA} --yarn-original-max-position-embeddings 8192",
        "8192 is not of multi-latent attention",
        f"{MLA} --original-max-position-embeddings 8192",
    ),
    Case(
        "yarn_starts_from_one_length",
        f"{YARN} --original-max-position-embeddings 8192",
        "8192 is of multi-latent attention alone",
        f"{YARN} --yarn-original-max-position-embeddings 8192",
    ),
)
