"""Values shared between packages.

Frozen ``msgspec.Struct`` and attrs classes; both cross the worker link without code of our own. Nothing here opens
files or knows HTTP.

Terms: a *request* is one API call; a *choice* is one of its ``n`` answers; a *sequence* is the token stream of a
choice; a *step* is one scheduler iteration; a *batch* is the sequences of one forward pass.
"""

from __future__ import annotations

from enginehouse.contract.types.chats import (
    Chat,
    DecodedAudio,
    DecodedImage,
    DecodedMedia,
    Image,
    MediaPart,
    Message,
    Thinking,
    Tool,
    ToolCall,
    ToolUse,
)
from enginehouse.contract.types.engines import EngineCapabilities, EngineSettings, EngineStats, ModelInfo, Task
from enginehouse.contract.types.events import (
    CacheMiss,
    CallDelta,
    ChoiceFinished,
    Event,
    FinishReason,
    HeldTokens,
    PromptLogprobs,
    PromptProgress,
    ReasoningDelta,
    RequestFinished,
    TextDelta,
    TokenDetails,
    TokenLogprob,
    TopLogprob,
)
from enginehouse.contract.types.pooling import (
    PoolingInfo,
    PoolingRequest,
    PoolingResult,
    PoolTask,
    PoolText,
    ScoreKind,
)
from enginehouse.contract.types.requests import (
    Constraint,
    ConstraintKind,
    EngineRequest,
    GenerateRequest,
    ReasoningParams,
    RequestOptions,
    Resume,
    ResumedChoice,
    SamplingParams,
    Segment,
    StopParams,
)

__all__ = [
    "CacheMiss",
    "CallDelta",
    "Chat",
    "ChoiceFinished",
    "Constraint",
    "ConstraintKind",
    "DecodedAudio",
    "DecodedImage",
    "DecodedMedia",
    "EngineCapabilities",
    "EngineRequest",
    "EngineSettings",
    "EngineStats",
    "Event",
    "FinishReason",
    "GenerateRequest",
    "HeldTokens",
    "Image",
    "MediaPart",
    "Message",
    "ModelInfo",
    "PoolTask",
    "PoolText",
    "PoolingInfo",
    "PoolingRequest",
    "PoolingResult",
    "PromptLogprobs",
    "PromptProgress",
    "ReasoningDelta",
    "ReasoningParams",
    "RequestFinished",
    "RequestOptions",
    "Resume",
    "ResumedChoice",
    "SamplingParams",
    "ScoreKind",
    "Segment",
    "StopParams",
    "Task",
    "TextDelta",
    "Thinking",
    "TokenDetails",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "ToolUse",
    "TopLogprob",
]
