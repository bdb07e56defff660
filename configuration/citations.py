"""The papers behind the models and tasks, as BibTeX entries."""

CITATIONS = {
    "nplr": """@unpublished{fujii2026nplr,
  title = {Non-Commutative State Tracking with Input-Dependent Low-Rank Updates in {Mamba-3}},
  author = {Fujii, Hiroki and Yamakita, Masaki},
  year = {2026},
  note = {Submitted to the IEEE}
}""",
    "mamba3": """@inproceedings{lahoti2026mamba3,
  title = {{Mamba-3}: Improved Sequence Modeling using State Space Principles},
  author = {Lahoti, Aakash and Li, Kevin Y. and Chen, Berlin and Wang, Caitlin and Bick, Aviv and
            Kolter, J. Zico and Dao, Tri and Gu, Albert},
  booktitle = {International Conference on Learning Representations},
  year = {2026},
  eprint = {2603.15569},
  eprinttype = {arXiv}
}""",
    "deltanet": """@inproceedings{yang2024deltanet,
  title = {Parallelizing Linear Transformers with the Delta Rule over Sequence Length},
  author = {Yang, Songlin and Wang, Bailin and Zhang, Yu and Shen, Yikang and Kim, Yoon},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2024},
  eprint = {2406.06484},
  eprinttype = {arXiv}
}""",
    "gdn": """@inproceedings{yang2025gdn,
  title = {Gated Delta Networks: Improving {Mamba2} with Delta Rule},
  author = {Yang, Songlin and Kautz, Jan and Hatamizadeh, Ali},
  booktitle = {International Conference on Learning Representations},
  year = {2025},
  eprint = {2412.06464},
  eprinttype = {arXiv}
}""",
    "deltaproduct": """@inproceedings{siems2025deltaproduct,
  title = {{DeltaProduct}: Improving State-Tracking in Linear {RNNs} via Householder Products},
  author = {Siems, Julien and Carstensen, Timur and Zela, Arber and Hutter, Frank and Pontil, Massimiliano and
            Grazzi, Riccardo},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2025},
  eprint = {2502.10297},
  eprinttype = {arXiv}
}""",
    "ids4": """@inproceedings{merrill2024illusion,
  title = {The Illusion of State in State-Space Models},
  author = {Merrill, William and Petty, Jackson and Sabharwal, Ashish},
  booktitle = {International Conference on Machine Learning},
  year = {2024},
  eprint = {2404.08819},
  eprinttype = {arXiv}
}""",
}
# The tasks, and the models with a reflection, are those of this one.
PAPER = "nplr"


def bibtex(*papers: str) -> str:
    """The entries of these papers, each once, after that of the paper whose tasks and model these are."""
    return "\n\n".join(CITATIONS[name] for name in dict.fromkeys((PAPER, *papers)))
