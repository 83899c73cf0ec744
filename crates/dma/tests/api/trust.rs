//! An untrusted device is strict, whatever was configured.

use ringfence_dma::{
    Detector, Device, Direction, Distrust, DmaConfig, Fallback, Policy, Refused, SetupError,
    SwitchError, Trust,
};
use ringfence_iommu::{Capabilities, table::Limits};

use crate::mock::{Bench, Buf, EagerAllocator, MockDomain, Setup};

const UNTRUSTED: Trust = Trust::Untrusted { why: Distrust::Removable };
const BECAUSE: Fallback = Fallback::Untrusted { why: Distrust::Removable };

fn bench(policy: Policy, change: impl FnOnce(&mut DmaConfig)) -> Bench {
    let mut setup = Setup::new(policy);
    change(&mut setup.config);
    setup.build()
}

fn refused(config: DmaConfig, capabilities: Capabilities) -> SetupError {
    let domain = MockDomain::new(4096, capabilities, Limits::NONE);
    let allocator = EagerAllocator::new(4096, domain.log.clone());
    Device::builder(domain).allocator(allocator).config(config).build().map(|_| ()).unwrap_err()
}

#[test]
fn an_untrusted_device_is_strict_whatever_the_policy_and_reports_why() {
    // rule L28
    for policy in Policy::ALL {
        let bench = bench(policy, |config| config.trust = UNTRUSTED);
        let in_force = bench.device.effective_policy();
        assert!(in_force.is_strict(), "{policy} became {in_force}");
        // An untrusted device may bounce, but it has no pools.
        let no_pools = policy.bounces().then_some(Fallback::NoPools);
        let because = (!policy.is_strict()).then_some(BECAUSE).or(no_pools);
        assert_eq!(bench.device.fallback(), because);
        // The same applies to a change at run time.
        assert_eq!(bench.device.refuses(policy), bench.device.fallback());
        // In effect, not only in name.
        let mapping = bench.device.map(Buf::new(&[(0x5000, 0x1000)]), Direction::FromDevice);
        let mapping = mapping.unwrap();
        let iova = mapping.iova().0;
        assert_ne!(iova, 0x5000, "mapped, not passed through");
        assert!(bench.domain.reach(iova).is_some());
        mapping.unmap().unwrap();
        assert_eq!(bench.domain.reach(iova), None);
        bench.assert_nothing_leaked();
    }
}

#[test]
fn a_demand_for_a_policy_that_an_untrusted_device_cannot_have_is_refused() {
    // rule L28
    for policy in Policy::ALL.into_iter().filter(|policy| !policy.bounces()) {
        let demand = |trust| DmaConfig { trust, demand: true, ..DmaConfig::new(policy) };
        if policy.is_strict() {
            let bench = bench(policy, |config| *config = demand(UNTRUSTED));
            assert_eq!(bench.device.effective_policy(), policy);
        } else {
            let because = BECAUSE;
            let wanted = SetupError::Refused(Refused { policy, because });
            assert_eq!(refused(demand(UNTRUSTED), Capabilities::FULL), wanted);
        }
        let bench = bench(policy, |config| *config = demand(Trust::Trusted));
        assert_eq!((bench.device.effective_policy(), bench.device.fallback()), (policy, None));
    }
}

#[test]
fn nor_does_a_demand_become_something_else_for_another_reason() {
    let strict_only = Capabilities::default();
    let demand = DmaConfig { demand: true, ..DmaConfig::new(Policy::LazyMqMap) };
    let (policy, because) = (demand.policy, Fallback::NoDeferredFlush);
    let wanted = SetupError::Refused(Refused { policy, because });
    assert_eq!(refused(demand.clone(), strict_only), wanted);
    let because = Fallback::Detector;
    let wanted = SetupError::Refused(Refused { policy, because });
    let detect = Some(Detector::default());
    assert_eq!(refused(DmaConfig { detect, ..demand }, Capabilities::FULL), wanted);
}

#[test]
fn distrust_is_the_first_reason_reported() {
    let detect = Some(Detector::default());
    let bench = bench(Policy::LazySq, |config| {
        *config = DmaConfig { trust: UNTRUSTED, detect, ..config.clone() };
    });
    assert_eq!(bench.device.fallback(), Some(BECAUSE));
    assert_eq!(bench.device.effective_policy(), Policy::Strict);
    assert_eq!(bench.device.refuses(Policy::Off), Some(BECAUSE));
}

#[test]
fn a_change_at_run_time_is_refused_as_the_beginning_would_have_been() {
    // rule L28
    let untrusted = bench(Policy::Strict, |config| config.trust = UNTRUSTED);
    let detecting = bench(Policy::Strict, |config| config.detect = Some(Detector::default()));
    for (bench, because) in [(untrusted, BECAUSE), (detecting, Fallback::Detector)] {
        for policy in Policy::ALL {
            let changed = bench.device.set_policy(policy);
            if policy.bounces() {
                let without = match because {
                    Fallback::Detector => Fallback::Detector,
                    _ => Fallback::NoPools,
                };
                assert_eq!(changed, Err(SwitchError::Fallback(without)), "{policy}");
            } else if policy.is_strict() {
                assert_eq!(changed, Ok(()));
                assert_eq!(bench.device.effective_policy(), policy);
            } else {
                let from = bench.device.effective_policy();
                let refused = match policy {
                    Policy::Off => SwitchError::Off { from, to: policy },
                    _ => SwitchError::Fallback(because),
                };
                assert_eq!(changed, Err(refused), "{policy}");
                assert!(bench.device.effective_policy().is_strict());
            }
        }
    }
}

#[test]
fn a_trusted_device_refuses_what_its_domain_or_its_detector_cannot_do() {
    let trusted = bench(Policy::Strict, |_| ());
    let detecting = bench(Policy::Strict, |config| config.detect = Some(Detector::default()));
    let mut setup = Setup::new(Policy::Strict);
    setup.capabilities = Capabilities::default();
    let strict_only = setup.build();
    for policy in Policy::ALL {
        let no_pools = policy.bounces().then_some(Fallback::NoPools);
        assert_eq!(trusted.device.refuses(policy), no_pools);
        let watched = !policy.is_strict() || policy.bounces();
        assert_eq!(detecting.device.refuses(policy), watched.then_some(Fallback::Detector));
        let refused = policy.is_lazy().then_some(Fallback::NoDeferredFlush).or(no_pools);
        assert_eq!(strict_only.device.refuses(policy), refused);
    }
}
