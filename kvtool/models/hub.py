"""Ask the hub once whether it has a model, before anything heavy is imported."""

from __future__ import annotations

from pathlib import Path

from kvtool.models.failures import Unreachable as Unreachable
from kvtool.models.failures import translate_hub, unreachable
from kvtool.models.folder import find_source, is_bundled


def check_hub(model: str | None, revision: str | None = None) -> None:
    """Refuse a model that is neither here nor on the hub, or whose hub cannot be reached.

    What the hub's cache holds already is not asked for. There is one request, without retries; a
    hub that is there but unwell is left to those of transformers.

    Raises:
        UsageError, KvtoolError: as `kvtool.models.load.load`.
    """
    if model is None or is_bundled(model) or Path(find_source(model)[1]).is_dir():
        return
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        if isinstance(try_to_load_from_cache(model, "config.json", revision=revision), str):
            return
        get_hf_file_metadata(hf_hub_url(model, "config.json", revision=revision))
    except (GatedRepoError, RepositoryNotFoundError) as error:
        raise translate_hub(model, str(error), error) from error
    except (EntryNotFoundError, RevisionNotFoundError, HfHubHTTPError):
        return  # of which transformers tells more
    except ValueError as error:  # no name of a model
        raise translate_hub(model, str(error), error) from error
    except Exception as error:  # any: of the network, by whichever client the hub's package has
        raise unreachable(model) from error


def check_hub_data(name: str) -> None:
    """Refuse a dataset of a hub that cannot be reached, unless the hub's cache has some of it.

    There is one request, without retries; what the hub answers is left to who reads the data.

    Raises:
        Unreachable: there is no answer.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    try:
        if isinstance(try_to_load_from_cache(name, "README.md", repo_type="dataset"), str):
            return
        get_hf_file_metadata(hf_hub_url(name, "README.md", repo_type="dataset"))
    except (HfHubHTTPError, ValueError):
        return  # of which the reader of the data tells more
    except Exception as error:  # any: of the network, by whichever client the hub's package has
        raise Unreachable(f"the hub cannot be reached for data `{name}`") from error
