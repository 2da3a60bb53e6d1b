"""An exported folder on the hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi, constants

from ftis_node.errors import UserError, first_line


def upload(folder: Path, repository: str, *, private: bool) -> str:
    """Upload a folder as a model repository, which is made if it is not there; return its address.

    Raises:
        UserError: the hub refuses, or cannot be reached; the folder stays.
    """
    api = HfApi(endpoint=constants.ENDPOINT)
    try:
        made = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="A model trained with F-TIS by ftis-node"
        )
    except Exception as error:  # as many kinds as there are layers
        raise UserError(
            f"{folder} was written, but not uploaded to {repository}: {first_line(error)}",
            "Log in with `hf auth login` or HF_TOKEN, and see that the repository is yours; then: "
            f"hf upload {repository} {folder}",
        ) from error
    return str(made)
