"""Speculative decoding: drafters, acceptance, draft length, and the loop over a verifier."""

from replayssm.speculate.acceptance import Acceptance, accept_greedy, accept_point_mass, accept_rejection
from replayssm.speculate.adaptive import AdaptiveLength, GivenCosts, MeasuredCosts
from replayssm.speculate.draft_model import ModelDrafter, check_vocabularies
from replayssm.speculate.drafter import Accepted, Draft, Drafter, Start
from replayssm.speculate.loop import speculate
from replayssm.speculate.mtp import MtpDrafter
from replayssm.speculate.mtp_head import load_mtp_head
from replayssm.speculate.ngram import NgramDrafter
from replayssm.speculate.reference import RecomputingVerifier
from replayssm.speculate.sampling import Sampling
from replayssm.speculate.statistics import Generation, Statistics
from replayssm.speculate.verifier import Prefilled, Verified, Verifier

__all__ = [
    "Acceptance",
    "Accepted",
    "AdaptiveLength",
    "Draft",
    "Drafter",
    "Generation",
    "GivenCosts",
    "MeasuredCosts",
    "ModelDrafter",
    "MtpDrafter",
    "NgramDrafter",
    "Prefilled",
    "RecomputingVerifier",
    "Sampling",
    "Start",
    "Statistics",
    "Verified",
    "Verifier",
    "accept_greedy",
    "accept_point_mass",
    "accept_rejection",
    "check_vocabularies",
    "load_mtp_head",
    "speculate",
]
