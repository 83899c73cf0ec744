//! The numbers of the front end's requests, and of the back end's own.
#![allow(missing_docs, reason = "the names are the specification's")]

/// The back end's own requests, on its own channel.
pub const BACKEND_IOTLB_MSG: u32 = 1;
pub const BACKEND_CONFIG_CHANGE_MSG: u32 = 2;

/// Makes the constants and their names.
macro_rules! codes {
    ($($code:ident = $number:literal),* $(,)?) => {
        $(pub const $code: u32 = $number;)*

        /// A request's name, for messages: of the front end's, and of the back end's if it has the
        /// same number.
        pub fn name(request: u32) -> String {
            let name = match request {
                $($code => stringify!($code),)*
                _ => return format!("request {request}"),
            };
            match request {
                BACKEND_IOTLB_MSG => format!("{name} or BACKEND_IOTLB_MSG"),
                BACKEND_CONFIG_CHANGE_MSG => format!("{name} or BACKEND_CONFIG_CHANGE_MSG"),
                _ => name.to_owned(),
            }
        }
    };
}

codes! {
    GET_FEATURES = 1, SET_FEATURES = 2, SET_OWNER = 3, RESET_OWNER = 4, SET_MEM_TABLE = 5,
    SET_LOG_BASE = 6, SET_LOG_FD = 7, SET_VRING_NUM = 8, SET_VRING_ADDR = 9,
    SET_VRING_BASE = 10, GET_VRING_BASE = 11, SET_VRING_KICK = 12, SET_VRING_CALL = 13,
    SET_VRING_ERR = 14, GET_PROTOCOL_FEATURES = 15, SET_PROTOCOL_FEATURES = 16,
    GET_QUEUE_NUM = 17, SET_VRING_ENABLE = 18, SEND_RARP = 19, NET_SET_MTU = 20,
    SET_BACKEND_REQ_FD = 21, IOTLB_MSG = 22, GET_CONFIG = 24, SET_CONFIG = 25,
    POSTCOPY_ADVISE = 28, POSTCOPY_LISTEN = 29, POSTCOPY_END = 30, GET_INFLIGHT_FD = 31,
    SET_INFLIGHT_FD = 32, RESET_DEVICE = 34, GET_MAX_MEM_SLOTS = 36, ADD_MEM_REG = 37,
    REM_MEM_REG = 38, SET_STATUS = 39, GET_STATUS = 40,
}
