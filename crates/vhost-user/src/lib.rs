//! The vhost-user protocol, front end and back end
