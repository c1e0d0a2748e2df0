"""NeMo-DCR beside Megatron: conversion tasks of a megatron-core model, from Megatron-Bridge's own mapping objects."""
