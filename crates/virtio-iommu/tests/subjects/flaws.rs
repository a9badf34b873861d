//! Flaws of broken devices.

/// Declares the flaws, named for their behaviour, with the statement that each violates. 0 marks a
/// deviation from this crate's device that no statement forbids.
macro_rules! flaws {
    ($($number:literal $flaw:ident,)*) => {
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Flaw {
            $($flaw,)*
        }

        pub(crate) const FLAWS: &[(u8, Flaw)] = &[$(($number, Flaw::$flaw),)*];
    };
}

flaws! {
    0 FailureWithShortLength,
    1 OffersBothBypasses,
    1 HidesMapUnmap,
    2 NoPageSize,
    3 BypassReadsWhatWasWritten,
    4 ResetRevertsBypass,
    4 SystemResetKeepsBypass,
    5 PageSizeIsWritable,
    6 ResetKeepsAttachments,
    7 OpenBeforeAttachment,
    8 BypassNeedsAcceptance,
    9 UnknownTypeIsUnsupp,
    10 CutOffIsInval,
    11 FailureWithoutLength,
    12 HeadMustBeZero,
    12 TailIsNotZero,
    13 AttachIgnoresReserved,
    14 AttachIgnoresFlags,
    15 AttachInventsEndpoints,
    15 UnknownEndpointIsInval,
    16 ContradictionDetaches,
    16 ContradictionIsIgnored,
    17 StaysWhereItWas,
    18 JoinersSeeOnlyWhatIsNew,
    19 DetachUnknownIsInval,
    19 DetachFromAnyDomain,
    19 DetachMindsReserved,
    20 ReachesAfterDetach,
    21 DomainsLiveOn,
    22 RoundsMappings,
    22 MisalignedIsInval,
    23 OverlapReplaces,
    23 OverlapMapsTheRest,
    24 MapIgnoresFlags,
    24 MmioNeedsNoFeature,
    25 MapInNoDomainIsInval,
    25 MapInBypassIsOk,
    26 OutsideInputIsOk,
    27 ReservedCanBeMapped,
    28 WriteNeedsOnlyRead,
    28 ReadNeedsOnlyWrite,
    29 SplitRemovesTheRest,
    29 SplitIsInval,
    30 GapIsAnError,
    30 StopsAtGap,
    31 UnmapInNoDomainIsOk,
    31 UnmapInBypassIsOk,
    32 ProbeOfNobodyIsOk,
    32 ProbeAnswersUnoffered,
    33 ProbeShortIsOk,
    33 ProbeLeavesGarbage,
    33 ProbeLengthWithHead,
    34 TwoMsiRegions,
    34 RegionsOverlap,
    35 FaultOfAnyone,
    35 FaultReservedSet,
    35 FaultIsSplit,
    36 FaultsStallRequests,
    36 DropsAreNotCounted,
    37 PublishesFirst,
    38 BackwardsIsOk,
    38 TopIsOutOfRange,
    39 DoesNotWait,
    40 CapIsOk,
    40 CapIsInval,
}
