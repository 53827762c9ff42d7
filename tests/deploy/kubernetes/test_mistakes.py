"""Mistakes planted into the manifests are found, each by a sentence that names the place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deploy.validate.__main__ import validate
from deploy.validate.manifest import Manifest

Rendered = Callable[[str], list[Manifest]]
Plant = Callable[[Any], object]
GROUPS = "spec.rayClusterConfig.workerGroupSpecs"
HEAD = "spec.rayClusterConfig.headGroupSpec"


def spec(manifest: Manifest) -> Any:
    return manifest["spec"]


def cluster(manifest: Manifest) -> Any:
    return manifest["spec"]["rayClusterConfig"]


def group(manifest: Manifest, i: int) -> Any:
    return cluster(manifest)["workerGroupSpecs"][i]


def container(manifest: Manifest, i: int) -> Any:
    return group(manifest, i)["template"]["spec"]["containers"][0]


def head(manifest: Manifest) -> Any:
    return cluster(manifest)["headGroupSpec"]["template"]["spec"]["containers"][0]


def serve(old: str, new: str) -> Plant:
    def plant(manifest: Manifest) -> None:
        text = manifest["spec"]["serveConfigV2"]
        assert old in text
        manifest["spec"]["serveConfigV2"] = text.replace(old, new)

    return plant


# name: (what is done to the RayService of the gpu overlay, the place that is named, words of the sentence)
BY_SCHEMA: dict[str, tuple[Plant, str, str]] = {
    "an unknown field": (lambda m: spec(m).update(servConfig=1), "spec", "servConfig"),
    "a value that is none of the list": (
        lambda m: cluster(m)["autoscalerOptions"].update(version="v3"),
        "spec.rayClusterConfig.autoscalerOptions.version",
        "'v3' is not one of",
    ),
    "a group without a template": (
        lambda m: group(m, 1).pop("template"),
        f"{GROUPS}[1]",
        "'template' is a req",
    ),
    "a breach of a CEL rule": (lambda m: spec(m).update(managedBy="me"), "spec.managedBy", "managedBy"),
    "a number in text": (lambda m: group(m, 1).update(maxReplicas="8"), f"{GROUPS}[1].maxReplicas", "'8'"),
}
RAYSERVICE: dict[str, tuple[Plant, str, str]] = {
    "a typing error in a container": (
        lambda m: container(m, 2).update(imagePullPolcy="Always"),
        f"{GROUPS}[2].template.spec.containers[0]",
        "imagePullPolcy",
    ),
    "a name that is too long": (
        lambda m: m["metadata"].update(name="o" * 48),
        "metadata.name",
        "at most 47",
    ),
    "labels among the start parameters": (
        lambda m: group(m, 1)["rayStartParams"].update(labels="pool=draft"),
        f"{GROUPS}[1].rayStartParams.labels",
        "own field labels",
    ),
    "the Redis address in the environment": (
        lambda m: head(m)["env"].append({"name": "RAY_REDIS_ADDRESS", "value": "redis:6379"}),
        f"{HEAD}.template.spec.containers[0].env",
        "use redisAddress",
    ),
    "a restart policy with autoscaler v2": (
        lambda m: group(m, 0)["template"]["spec"].update(restartPolicy="Always"),
        f"{GROUPS}[0].template.spec.restartPolicy",
        "autoscaler v2",
    ),
    "network policies of the operator": (
        lambda m: cluster(m).update(networkPolicy={"mode": "DenyAll"}),
        "spec.rayClusterConfig.networkPolicy",
        "RayClusterNetworkPolicy=true",
    ),
    "TLS of the operator": (
        lambda m: cluster(m).update(tlsOptions={"enabled": True}),
        "spec.rayClusterConfig.tlsOptions",
        "RayClusterMTLS=true",
    ),
    "an embedded store": (
        lambda m: cluster(m)["gcsFaultToleranceOptions"].update(backend="rocksdb"),
        "spec.rayClusterConfig.gcsFaultToleranceOptions.backend",
        "GCSFaultToleranceEmbeddedStorage=true",
    ),
    "a Ray too old for tokens": (
        lambda m: cluster(m).update(rayVersion="2.51.1"),
        "spec.rayClusterConfig.rayVersion",
        "2.52.0 or later",
    ),
    "more at least than at most": (
        lambda m: group(m, 1).update(minReplicas=9),
        f"{GROUPS}[1]",
        "minReplicas above maxReplicas",
    ),
    "resources in two places": (
        lambda m: cluster(m)["headGroupSpec"]["rayStartParams"].update({"num-cpus": "0"}),
        f"{HEAD}.rayStartParams",
        "keep one",
    ),
    "an incremental upgrade by halves": (
        lambda m: spec(m).update(upgradeStrategy={"type": "NewClusterWithIncrementalUpgrade"}),
        "spec.upgradeStrategy",
        "'clusterUpgradeOptions' is a required",
    ),
    "a key that Serve ignores": (
        serve("route_prefix:", "max_qued_requests: 5\n  route_prefix:"),
        "spec.serveConfigV2: applications[0]",
        "not allowed ('max_qued_requests'",
    ),
    "a value that Serve refuses": (
        serve("port: 9000", "port: lots"),
        "spec.serveConfigV2: grpc_options.port",
        "integer",
    ),
    "a servicer that does not exist": (
        serve("add_GenerationServicer_to_server", "add_GeneratorServicer_to_server"),
        "spec.serveConfigV2: grpc_options.grpc_servicer_functions[0]",
        "to import",
    ),
    "an application that does not exist": (
        serve("deploy.app:build", "deploy.apps:build"),
        "spec.serveConfigV2: applications[0].import_path",
        "to import",
    ),
    "an argument that the application does not have": (
        serve("max_replicas: 8", "most_replicas: 8"),
        "spec.serveConfigV2: applications[0].args",
        "most_replicas",
    ),
    "a value that the application refuses": (
        serve("labels: {pool: draft}", "labels: {pool: draft}\n      kv_memory: plenty"),
        "spec.serveConfigV2: applications[0].args",
        "drafter.kv_memory",
    ),
    "a pool that no group has": (
        serve("{pool: router}", "{pool: ingress}"),
        "spec.serveConfigV2: router",
        "pool=ingress",
    ),
    "a verifier larger than its pods": (
        serve("tensor_parallel_size: 4", "tensor_parallel_size: 8"),
        "spec.serveConfigV2: verifier",
        "8 GPUs on one node",
    ),
    "more replicas than pods": (
        serve("max_replicas: 8", "max_replicas: 9"),
        "spec.serveConfigV2: drafter",
        "room for 8",
    ),
    "a password in the configuration": (
        serve("target: /models/target", "target: /models/target\n    store: redis://:hunter2@redis:6379"),
        "spec.serveConfigV2",
        "no password",
    ),
    "a password in the environment": (
        lambda m: container(m, 0)["env"].append({"name": "OUTRIDER_STORE", "value": "redis://:x@redis:6379"}),
        f"{GROUPS}[0].template.spec.containers[0].env[7].value",
        "from a Secret",
    ),
    "a container that may become root": (
        lambda m: container(m, 1)["securityContext"].pop("allowPrivilegeEscalation"),
        f"{GROUPS}[1].template.spec.containers[0].securityContext",
        "'allowPrivilegeEscalation' is a required",
    ),
    "a pod of root": (
        lambda m: group(m, 1)["template"]["spec"]["securityContext"].update(runAsUser=0),
        f"{GROUPS}[1].template.spec.securityContext.runAsUser",
        "no user 0",
    ),
    "an image without a version": (
        lambda m: container(m, 1).update(image="outrider:latest"),
        f"{GROUPS}[1].template.spec.containers[0].image",
        "name a version, and not latest",
    ),
    "memory without a bound": (
        lambda m: container(m, 1)["resources"].pop("limits"),
        f"{GROUPS}[1].template.spec.containers[0].resources",
        "'limits' is a required",
    ),
    "an amount that is none": (
        lambda m: container(m, 1)["resources"]["requests"].update(cpu="six"),
        f"{GROUPS}[1].template.spec.containers[0].resources.requests.cpu",
        "'six' does not match",
    ),
    "a probe by a proxy that reaches nobody": (
        lambda m: container(m, 1).pop("readinessProbe"),
        f"{GROUPS}[1].template.spec.containers[0]",
        "without a port serve",
    ),
    "no gRPC in the Service": (
        lambda m: head(m)["ports"].pop(),
        f"{HEAD}.template.spec.containers[0].ports",
        "serve-grpc",
    ),
    "clients at the head": (
        lambda m: spec(m).update(excludeHeadPodFromServeSvc=False),
        "spec.excludeHeadPodFromServeSvc",
        "must be true",
    ),
}
# name: (kind, name, what is done to it, the place that is named, words of the sentence)
OTHERS: dict[str, tuple[str, str, Plant, str, str]] = {
    "a budget that Kubernetes cannot count": (
        "PodDisruptionBudget",
        "outrider-target",
        lambda m: m["spec"].update(minAvailable="50%"),
        "spec.minAvailable",
        "integer minAvailable",
    ),
    "a budget of no pods": (
        "PodDisruptionBudget",
        "outrider-target",
        lambda m: m["spec"]["selector"].update(matchLabels={"pool": "verify"}),
        "spec.selector",
        "pool=verify",
    ),
    "a policy that lets nobody in": (
        "NetworkPolicy",
        "outrider-target",
        lambda m: m["spec"]["ingress"][0]["from"][0]["podSelector"]["matchExpressions"][0]["values"].append(
            "d"
        ),
        "spec.ingress[0].from[0].podSelector",
        "pool=d,",
    ),
    "a port that is no port": (
        "NetworkPolicy",
        "outrider-router",
        lambda m: m["spec"]["ingress"][0]["ports"][0].update(port=[8000]),
        "spec.ingress[0].ports[0].port",
        "[8000]",
    ),
    "a service of no pods": (
        "Service",
        "outrider-redis",
        lambda m: m["spec"].update(selector={"pool": "cache"}),
        "spec.selector",
        "pool=cache",
    ),
    "a monitor of no pods": (
        "PodMonitor",
        "outrider",
        lambda m: m["spec"].update(selector={"matchLabels": {"pool": "drafts"}}),
        "spec.selector",
        "pool=drafts",
    ),
    "a monitor of a port that no pod has": (
        "PodMonitor",
        "outrider-router",
        lambda m: m["spec"]["podMetricsEndpoints"][0].update(port="https"),
        "spec.podMetricsEndpoints[0].port",
        "'https', which no pod here has",
    ),
    "an alert that says for how long in no unit": (
        "PrometheusRule",
        "outrider",
        lambda m: m["spec"]["groups"][0]["rules"][0].update({"for": "60"}),
        "spec.groups[0].rules[0].for",
        "must be a time such as 5m",
    ),
    "an alert without a severity": (
        "PrometheusRule",
        "outrider",
        lambda m: m["spec"]["groups"][0]["rules"][0].update(labels={}),
        "spec.groups[0].rules[0].labels",
        "'severity' is a required property",
    ),
    "a kind in the wrong group": (
        "StatefulSet",
        "outrider-redis",
        lambda m: m.update(apiVersion="batch/v1"),
        "kind",
        "find schema for kind StatefulSet",
    ),
}


def found(manifests: list[Manifest], place: str, words: str) -> bool:
    """Returns True if a finding names the place, Kind/name: path, and says the words."""
    return any(line.startswith(f"{place}: ") and words in f"{line}," for line in validate(manifests).findings)


def plant(manifests: list[Manifest], kind: str, name: str, change: Plant) -> Manifest:
    (found,) = [e for e in manifests if e["kind"] == kind and e["metadata"]["name"] == name]
    change(found)
    return found


@pytest.mark.parametrize("mistake", [*RAYSERVICE, *BY_SCHEMA])
def test_a_mistake_in_the_rayservice_is_found(mistake: str, rendered: Rendered) -> None:
    change, place, words = (RAYSERVICE | BY_SCHEMA)[mistake]
    manifests = rendered("gpu")
    name = plant(manifests, "RayService", "outrider", change)["metadata"]["name"]
    assert found(manifests, f"RayService/{name}: {place}", words), validate(manifests).findings


@pytest.mark.parametrize("mistake", OTHERS)
def test_a_mistake_elsewhere_is_found(mistake: str, rendered: Rendered) -> None:
    kind, name, change, place, words = OTHERS[mistake]
    manifests = rendered("gpu")
    plant(manifests, kind, name, change)
    assert found(manifests, f"{kind}/{name}: {place}", words), validate(manifests).findings


@pytest.mark.parametrize(
    ("kind", "plant"),
    [
        ("NetworkPolicy", lambda m: spec(m).update(ingress=[None])),
        ("NetworkPolicy", lambda m: spec(m)["podSelector"].update(matchExpressions=[None])),
        ("RayService", lambda m: cluster(m).update(authOptions=-1)),
        ("RayService", lambda m: group(m, 2).update(template="x")),
        (
            "RayService",
            lambda m: container(m, 2)["resources"].update(requests={"cpu": "1k", "memory": "1Gi"}),
        ),
        ("RayService", serve("grpc_options:", "grpc_options: 5\nlogging_config:")),
    ],
)
def test_whatever_a_manifest_holds_the_answer_is_a_sentence(
    kind: str, plant: Plant, rendered: Rendered
) -> None:
    manifests = rendered("gpu")
    plant(next(entry for entry in manifests if entry["kind"] == kind and spec(entry).get("ingress", True)))
    assert validate(manifests).findings
