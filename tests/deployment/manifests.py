"""What is wrong with a Kubernetes manifest, without a cluster.

Kinds of Kubernetes itself are judged by kubernetes-validate, which has the schemas of
the API; custom resources by the schemas of this folder, and the templates of pods and
jobs inside them by kubernetes-validate again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / "solutions/phase4_production/deployment"
KUBERNETES = "1.34.0"
CUSTOM = yaml.safe_load((HERE / "schemas/custom_resources.yaml").read_text())["kinds"]

Document = dict[str, Any]


def documents(path: Path) -> list[Document]:
    return list(yaml.safe_load_all(path.read_text()))


def faults(document: Document) -> list[str]:
    """A line for each; [] if the manifest would be taken."""
    kind = f"{document.get('apiVersion')} {document.get('kind')}"
    if kind not in CUSTOM:
        return kubernetes_faults(document)
    found = [
        f"{kind}: {'.'.join(map(str, error.absolute_path))}: {error.message}"
        for error in Draft202012Validator(CUSTOM[kind]).iter_errors(document)
    ]
    return found or [
        line for inside in templates(document) for line in kubernetes_faults(inside)
    ]


def kubernetes_faults(document: Document) -> list[str]:
    import kubernetes_validate

    try:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        where = ".".join(map(str, error.path))
        return [f"{document['kind']}: {where}: {error.message}"]
    except kubernetes_validate.SchemaNotFoundError as error:
        return [f"{document.get('kind')}: {error}"]
    return []


def templates(document: Document) -> Iterator[Document]:
    """The Jobs and PodTemplates that the operator of a custom resource would make."""
    spec = document["spec"]
    jobset = spec.get("template", {}).get("spec", spec)
    for job in jobset.get("replicatedJobs", []):
        yield {"apiVersion": "batch/v1", "kind": "Job", **job["template"]}
    cluster = spec.get("rayClusterSpec", {})
    groups = [cluster.get("headGroupSpec"), *cluster.get("workerGroupSpecs", [])]
    for group in filter(None, groups):
        template = {"template": group["template"]}
        yield {"apiVersion": "v1", "kind": "PodTemplate", **template}
