"""Text in, token ids out: ``open_corpus`` builds a token file once, ``Sampler`` draws microbatches from it."""

from swarm.data.corpus import Corpus, open_corpus
from swarm.data.sampler import Sampler
from swarm.data.tokenizers import tokenizer_digest

__all__ = ["Corpus", "Sampler", "open_corpus", "tokenizer_digest"]
