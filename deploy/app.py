"""The Ray Serve application: routers, verifiers and drafters, each a deployment of its own.

`serve run deploy.app:build KEY=VALUE ...`, or `import_path: deploy.app:build` in a config file, such as
deploy/serve.yaml.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

# Ray reports its use to its makers unless told not to. Read when a cluster starts: in time for `serve run`.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from ray import serve
from ray.serve import Application

from deploy.args import AppArgs, PoolArgs, models, parse
from deploy.autoscaling import DrafterPolicy, VerifierPolicy
from deploy.ingress import NO_LIMIT, Ingress, RouterOptions
from deploy.registry import Registry
from deploy.workers import DrafterReplica, VerifierReplica
from outrider.options.protection import check_reach
from router.config import LOOPBACK

log = logging.getLogger(__name__)

Options = dict[str, Any]  # of a deployment

HEALTH_SECONDS = 2.0  # between two health checks of a worker
LEAVE_SECONDS = 10.0  # that a replica may take to leave beyond its draining
SETTLING = 2  # look-back times: in one the sessions find a new drafter, in the next it is measured
REGISTRY_CPUS = 0.1
STORE_VARIABLE = "OUTRIDER_STORE"  # of the environment: as the argument store, for addresses with a password


def build(args: Mapping[str, Any]) -> Application:
    """Returns the application. Raises StartupError with a sentence that names the argument to change."""
    return application(parse(args))


def application(told: AppArgs, host: str | None = None) -> Application:
    """Returns the application for arguments that are validated. `host`: where workers listen; None = at their
    node's address."""
    network = told.network.model_copy(update={"host": host})
    target, draft, name = models(told)
    shared = told.store or os.environ.get(STORE_VARIABLE)
    check_reach(LOOPBACK, shared, None, told.insecure)
    if shared is None and told.router.replicas > 1:
        log.warning(
            "there are %d routers and no Redis (argument store): a stream that broke off can be resumed only "
            "where the same router happens to be asked",
            told.router.replicas,
        )
    serve_logs = {"encoding": network.logging.log_format.upper()}  # what Serve itself says there
    logged: Options = {"logging_config": serve_logs}
    registry = serve.deployment(name="Registry", **registry_options(told), **logged)(Registry)
    source = shared or registry.bind()
    verifiers = serve.deployment(name="Verifier", **verifier_options(told), **logged)(VerifierReplica)
    workers = [verifiers.bind(target, name, told.verifier, network, source)]
    if told.has_drafters:
        drafters = serve.deployment(name="Drafter", **drafter_options(told), **logged)(DrafterReplica)
        propose = None if told.both else told.propose
        workers.append(drafters.bind(draft, propose, told.drafter, network, source))
    if told.both:
        lookup = serve.deployment(name="Lookup", **lookup_options(told), **logged)(DrafterReplica)
        workers.append(lookup.bind(None, told.propose, told.lookup, network, source))
    options = RouterOptions(told.sessions, network, told.api_keys)
    routers = serve.deployment(name="Router", **router_options(told), **logged)(Ingress)
    return routers.bind(options, source, *workers)


def router_options(args: AppArgs) -> Options:
    router = args.router
    return {
        "num_replicas": router.replicas,
        "max_ongoing_requests": NO_LIMIT,
        "graceful_shutdown_timeout_s": router.drain_seconds + LEAVE_SECONDS,
        "ray_actor_options": _actor(router.cpus, 0, {}, router.labels),
    }


def registry_options(args: AppArgs) -> Options:
    """Returns options by which it runs where routers do: nodes of the worker pools come and go."""
    actor = _actor(REGISTRY_CPUS, 0, {}, args.router.labels)
    return {"max_ongoing_requests": NO_LIMIT, "ray_actor_options": actor}


def verifier_options(args: AppArgs) -> Options:
    policy = {
        "policy_function": VerifierPolicy,
        "policy_kwargs": {"max_step_seconds": args.autoscaling.max_step_seconds},
    }
    leave = args.verifier.drain_seconds + LEAVE_SECONDS
    return _pool(args, args.verifier, policy) | {"graceful_shutdown_timeout_s": leave}


def drafter_options(args: AppArgs) -> Options:
    settle = {"settle_seconds": SETTLING * args.autoscaling.look_back_seconds}
    policy = {"policy_function": DrafterPolicy, "policy_kwargs": settle}
    return _pool(args, args.drafter, policy) | {"graceful_shutdown_timeout_s": LEAVE_SECONDS}


def lookup_options(args: AppArgs) -> Options:
    """Returns options of the one that guesses beside draft models."""
    return _pool(args, args.lookup, {}) | {"graceful_shutdown_timeout_s": LEAVE_SECONDS}


def _pool(args: AppArgs, pool: PoolArgs, policy: Options) -> Options:
    return {
        **_size(args, pool, policy),
        **_placement(pool),
        "health_check_period_s": HEALTH_SECONDS,
        "health_check_timeout_s": pool.probe_seconds + HEALTH_SECONDS,
        "graceful_shutdown_wait_loop_s": 0.1,  # no request of Serve's is ever in progress here
    }


def _size(args: AppArgs, pool: PoolArgs, policy: Options) -> Options:
    if pool.min_replicas == pool.max_replicas:
        return {"num_replicas": pool.max_replicas}
    scaling = args.autoscaling
    return {
        "autoscaling_config": {
            "min_replicas": pool.min_replicas,
            "max_replicas": pool.max_replicas,
            "upscale_delay_s": scaling.upscale_seconds,
            "downscale_delay_s": scaling.downscale_seconds,
            "look_back_period_s": scaling.look_back_seconds,
            "policy": policy,
        }
    }


def _placement(pool: PoolArgs) -> Options:
    """Returns the placement of one process, or of a group on one node: the replica in the first bundle, a
    follower in each other."""
    actor = _actor(pool.cpus, pool.gpus_each, pool.resources, pool.labels)
    size = pool.engine.tensor_parallel_size
    if size == 1:
        return {"ray_actor_options": actor}
    selector = actor.pop("label_selector", None)
    bundle = {"CPU": pool.cpus, "GPU": pool.gpus_each, **pool.resources}
    group: Options = {
        "ray_actor_options": actor,
        "placement_group_bundles": [{kind: amount for kind, amount in bundle.items() if amount}] * size,
        "placement_group_strategy": "STRICT_PACK",
    }
    return group | ({"placement_group_bundle_label_selector": [selector] * size} if selector else {})


def _actor(cpus: float, gpus: float, resources: dict[str, float], labels: dict[str, str]) -> Options:
    options: Options = {"num_cpus": cpus, "num_gpus": gpus}
    if resources:
        options["resources"] = resources
    if labels:
        options["label_selector"] = labels
    return options
