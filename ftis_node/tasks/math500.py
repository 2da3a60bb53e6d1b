"""MATH-500: the 500 problems of MATH (Hendrycks et al. 2021, arXiv 2103.03874) that Lightman et al. (2023, arXiv
2305.20050) tested on. It serves evaluation only: it is one test, without a training half, judged by the rule `math`.
"""

from ftis_node.errors import UsageError
from ftis_node.host.files import cache_dir
from ftis_node.tasks.download import LOCAL_COPY, Remote, cached
from ftis_node.tasks.jsonl import GOLDS, Layout, read_rows
from ftis_node.tasks.source import Source
from ftis_node.tasks.task import Task

TEST = Remote(
    "https://huggingface.co/datasets/HuggingFaceH4/MATH-500/resolve/6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be/test.jsonl",
    446_564,
    "35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132",
)

# In Qwen2.5's tokens. With its template a problem has 158 on average and at most 878. The reference solutions have 219
# on average, 825 at the 99th percentile, and one of the 500 more than 1,024. Models write more than people do, but at
# twice the cap every endless completion would cost twice the time.
PROMPT_TOKENS = 1024
COMPLETION_TOKENS = 1024


class Math500(Source):
    """The task from a local file, from the cache, or from its source, pinned by revision and sha256."""

    names = ("math500",)
    has_files = True

    def _load(self) -> Task:
        raise UsageError(
            "The task math500 is a test: it has nothing to train on, and its verdicts cannot be shared by a run.",
            "Train on another task, for example gsm8k, and use: ftis-node eval --task math500.",
        )

    def _test(self) -> Task:
        path = self.data or cached(TEST, cache_dir() / "math500-test.jsonl", fix=LOCAL_COPY)
        digest, rows, _ = read_rows(path, Layout(*GOLDS["math"], fields=("problem",)))
        return Task.by_rule(self.name, (), rows, digest, "math", (PROMPT_TOKENS, COMPLETION_TOKENS))
